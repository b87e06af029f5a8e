// Nodes as processes on hosts made by ci/hosts: what survivors see when one of them dies, freezes,
// loses its link or fails. Times in the expectations are bounds that keep a hang from passing, an
// order of magnitude above what is measured.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::StartsWith;

class UcxHosts : public testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "ci/hosts makes network namespaces, which needs root";
    if (std::system(TIDE_HOSTS " 1 1 true >/dev/null 2>&1") != 0)
      GTEST_SKIP() << "ci/hosts does not work here";
    std::string pattern = testing::TempDir() + "tide-hosts-XXXXXX";
    store_ = mkdtemp(pattern.data());
    const char* library = std::getenv("TIDE_TEST_UCX_LIBRARY");
    if (library != nullptr) library_ = std::string(" library=") + library;
  }
  void TearDown() override {
    if (HasFailure()) std::cerr << output();
    if (!store_.empty()) fs::remove_all(store_);
  }

  // Runs `nodes` nodes; false if they did not end within a minute.
  bool run(int nodes, const std::string& arguments, const std::string& options = "") {
    std::ostringstream command;
    command << "timeout -s TERM 60 " << TIDE_HOSTS << " " << options << " " << nodes << " 1 "
            << TIDE_UCX_NODE << " " << store_ << library_ << " " << arguments << " >" << store_
            << "/output 2>&1";
    const int status = std::system(command.str().c_str());
    return WEXITSTATUS(status) != 124;
  }
  std::string result(int node) const { return text_of(store_ + "/result." + std::to_string(node)); }
  std::string output() const { return text_of(store_ + "/output"); }
  static std::string text_of(const std::string& path) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }
  void expect_survivors_say(int nodes, const std::string& what) {
    for (int node = 0; node + 1 < nodes; ++node) {
      EXPECT_THAT(result(node), StartsWith("error peer lost: node " + std::to_string(node) +
                                           " of group 'faults': "));
      EXPECT_THAT(result(node), HasSubstr(what));
      EXPECT_THAT(result(node), HasSubstr("\nclean\n"));
    }
  }

  std::string store_;
  std::string library_;
};

TEST_F(UcxHosts, EveryByteIsRight) {
  for (const int nodes : {2, 3, 5}) {
    ASSERT_TRUE(run(nodes, "operations=10")) << "a hang with " << nodes << " nodes";
    for (int node = 0; node < nodes; ++node) EXPECT_EQ(result(node), "done\nclean\nforeign 0\n");
    fs::remove_all(store_);
    fs::create_directory(store_);
  }
}

TEST_F(UcxHosts, ALimitedRailCarriesTheSameBytes) {
  ASSERT_TRUE(run(3, "operations=5 bytes=2000000", "--rate 200mbit"));
  for (int node = 0; node < 3; ++node) EXPECT_EQ(result(node), "done\nclean\nforeign 0\n");
}

TEST_F(UcxHosts, AKilledNodeIsNoticed) {
  ASSERT_TRUE(run(3, "fault=kill bytes=3000000"));
  expect_survivors_say(3, "node 2");
  EXPECT_EQ(result(2), "");
}

TEST_F(UcxHosts, ANodeThatExitsIsNoticed) {
  ASSERT_TRUE(run(3, "fault=exit"));
  expect_survivors_say(3, "node 2");
}

TEST_F(UcxHosts, AFrozenNodeIsSilent) {
  ASSERT_TRUE(run(3, "fault=stop"));
  expect_survivors_say(3, "node 2 has been silent for 5000 ms on rail0");
}

TEST_F(UcxHosts, ANapIsNoFailure) {
  ASSERT_TRUE(run(3, "fault=nap"));
  for (int node = 0; node < 3; ++node) EXPECT_EQ(result(node), "done\nclean\nforeign 0\n");
}

TEST_F(UcxHosts, ADeadLinkIsNoticedOnBothSides) {
  ASSERT_TRUE(run(3, "fault=down"));
  expect_survivors_say(3, "node 2");
  EXPECT_THAT(result(2), StartsWith("error peer lost: node 2 of group 'faults': node "));
}

TEST_F(UcxHosts, ABlackHoleIsNoticedOnBothSides) {
  ASSERT_TRUE(run(2, "fault=hole bytes=3000000"));
  EXPECT_THAT(result(0), HasSubstr("node 1 has been silent for 5000 ms on rail0"));
  EXPECT_THAT(result(1), HasSubstr("node 0 has been silent for 5000 ms on rail0"));
}

TEST_F(UcxHosts, ALinkThatComesBackInTimeIsNoFailure) {
  ASSERT_TRUE(run(3, "fault=blip peer_timeout_ms=20000"));
  for (int node = 0; node < 3; ++node) EXPECT_EQ(result(node), "done\nclean\nforeign 0\n");
}

TEST_F(UcxHosts, AFailureTravelsWithItsReason) {
  ASSERT_TRUE(run(3, "fault=fail"));
  expect_survivors_say(3, "node 2 reported: internal error: this node has had enough");
}

TEST_F(UcxHosts, ALateNodeIsWaitedFor) {
  ASSERT_TRUE(run(3, "fault=late operations=3"));
  for (int node = 0; node < 3; ++node) EXPECT_EQ(result(node), "done\nclean\nforeign 0\n");
}

TEST_F(UcxHosts, ANodeThatIsTooLateIsNamed) {
  ASSERT_TRUE(run(3, "fault=late late_ms=3000 deadline_ms=1000"));
  for (int node = 0; node < 2; ++node) {
    EXPECT_THAT(result(node), StartsWith("error timeout: "));
    EXPECT_THAT(result(node), HasSubstr("node 2 did not come to connect before the deadline"));
  }
  EXPECT_THAT(result(2), StartsWith("error "));
}

}  // namespace
