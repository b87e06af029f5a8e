// Which device is whose, on sysfs trees written as real machines show them.
#include "transports/ucx/rails.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace tide {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// A machine under a folder of its own: PCI devices below root complexes and switches, and
// InfiniBand devices on them.
class Machine {
 public:
  Machine() {
    std::string pattern = testing::TempDir() + "tide-rails-XXXXXX";
    root_ = mkdtemp(pattern.data());
    fs::create_directories(root_ / "devices");
    fs::create_directories(root_ / "bus/pci/devices");
    fs::create_directories(root_ / "class/net");
  }
  ~Machine() { fs::remove_all(root_); }

  // `where`: "pci0000:3a/0000:3a:01.0/0000:3b:00.0", below devices/.
  void pci(const std::string& where) {
    fs::create_directories(root_ / "devices" / where);
    const std::string address = fs::path(where).filename();
    fs::create_directory_symlink(root_ / "devices" / where, root_ / "bus/pci/devices" / address);
  }
  void infiniband(const std::string& name, const std::string& where,
                  const std::string& state = "4: ACTIVE",
                  const std::string& rate = "400 Gb/sec (4X NDR)") {
    const fs::path device = root_ / "devices" / where / "infiniband" / name;
    fs::create_directories(device / "ports/1");
    fs::create_directory_symlink(root_ / "devices" / where, device / "device");
    fs::create_directories(root_ / "class/infiniband");
    fs::create_directory_symlink(device, root_ / "class/infiniband" / name);
    std::ofstream(device / "ports/1/state") << state << "\n";
    std::ofstream(device / "ports/1/rate") << rate << "\n";
  }
  void interface(const std::string& name) { fs::create_directories(root_ / "class/net" / name); }
  void mark_virtual(const std::string& where) {
    fs::create_directories(root_ / "devices" / where / "physfn");
  }
  void port_state(const std::string& name, const std::string& state) {
    std::ofstream(root_ / "class/infiniband" / name / "ports/1/state") << state << "\n";
  }
  std::string root() const { return root_; }

 private:
  fs::path root_;
};

std::string hex2(int value) {
  static const char* const kDigits = "0123456789abcdef";
  return {kDigits[value / 16], kDigits[value % 16]};
}

// Eight GPUs and eight NICs as in a DGX: each pair below one switch, four switches a processor.
// NICs are named against the order of the GPUs, so that nothing comes out right by its name.
struct EightByEight {
  Machine machine;
  std::vector<std::string> gpus;

  EightByEight() {
    for (int i = 0; i < 8; ++i) {
      const std::string complex =
          "pci0000:" + hex2(0x10 + 0x10 * i) + "/0000:" + hex2(0x10 + 0x10 * i) + ":01.0/";
      const std::string upper = complex + "0000:" + hex2(0x11 + 0x10 * i) + ":00.0/";
      gpus.push_back("0000:" + hex2(0x13 + 0x10 * i) + ":00.0");
      machine.pci(upper + "0000:" + hex2(0x12 + 0x10 * i) + ":00.0/" + gpus.back());
      const std::string nic =
          upper + "0000:" + hex2(0x12 + 0x10 * i) + ":01.0/0000:" + hex2(0x14 + 0x10 * i) + ":00.0";
      machine.pci(nic);
      machine.infiniband("mlx5_" + std::to_string(7 - i), nic);
    }
  }
  RailQuestion question() const {
    RailQuestion question;
    question.root = machine.root();
    question.local_ranks = 8;
    question.gpus = gpus;
    return question;
  }
};

std::vector<std::string> names_of(const Result<std::vector<RailChoice>>& choices) {
  EXPECT_TRUE(choices.is_ok()) << choices.status().to_string();
  std::vector<std::string> names;
  if (!choices.is_ok()) return names;
  for (const RailChoice& choice : choices.value()) names.push_back(choice.device.name);
  return names;
}

std::vector<int> rails_of(const Result<std::vector<RailChoice>>& choices) {
  std::vector<int> rails;
  for (const RailChoice& choice : choices.value()) rails.push_back(choice.rail);
  return rails;
}

TEST(Rails, EachGpuTakesTheNicBelowItsSwitch) {
  const EightByEight dgx;
  const auto choices = choose_rails(dgx.question());
  EXPECT_THAT(names_of(choices), ElementsAre("mlx5_7:1", "mlx5_6:1", "mlx5_5:1", "mlx5_4:1",
                                             "mlx5_3:1", "mlx5_2:1", "mlx5_1:1", "mlx5_0:1"));
  EXPECT_THAT(rails_of(choices), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  for (const RailChoice& choice : choices.value()) {
    EXPECT_TRUE(choice.device.rdma);
    EXPECT_EQ(choice.device.gigabits, 400);
    EXPECT_THAT(choice.note, IsEmpty());
  }
}

TEST(Rails, APortThatIsDownSendsItsGpuElsewhereAndSaysSo) {
  EightByEight dgx;
  dgx.machine.port_state("mlx5_4", "1: DOWN");
  const auto choices = choose_rails(dgx.question());
  ASSERT_EQ(names_of(choices).size(), 8u);
  const RailChoice& moved = choices.value()[3];
  EXPECT_NE(moved.device.name, "mlx5_4:1");
  EXPECT_THAT(moved.note, HasSubstr("2 local ranks share " + moved.device.name));
  EXPECT_THAT(moved.note, HasSubstr("is not on the root complex of GPU " + dgx.gpus[3]));
  // Ranks 0 to 2 had taken theirs, so a device that nobody had is taken, the first by name.
  EXPECT_EQ(moved.device.name, "mlx5_0:1");
  EXPECT_EQ(moved.rail, 3);
  EXPECT_EQ(choices.value()[7].rail, 3);
}

TEST(Rails, FewerNicsThanGpusAreSharedByTheNearest) {
  Machine machine;
  RailQuestion question;
  question.root = machine.root();
  question.local_ranks = 4;
  for (int i = 0; i < 4; ++i) {  // two GPUs a processor, one NIC a processor
    const std::string complex = i < 2 ? "pci0000:10/0000:10:01.0/" : "pci0000:80/0000:80:01.0/";
    question.gpus.push_back("0000:" + hex2(0x21 + i) + ":00.0");
    machine.pci(complex + question.gpus.back());
  }
  for (const auto& [name, where] :
       {std::pair<std::string, std::string>{"mlx5_1", "pci0000:10/0000:10:02.0/0000:31:00.0"},
        {"mlx5_0", "pci0000:80/0000:80:02.0/0000:91:00.0"}}) {
    machine.pci(where);
    machine.infiniband(name, where);
  }
  const auto choices = choose_rails(question);
  EXPECT_THAT(names_of(choices), ElementsAre("mlx5_1:1", "mlx5_1:1", "mlx5_0:1", "mlx5_0:1"));
  EXPECT_THAT(rails_of(choices), ElementsAre(0, 0, 1, 1));
  for (const RailChoice& choice : choices.value())
    EXPECT_THAT(choice.note, HasSubstr("2 local ranks share"));
}

TEST(Rails, EquallyNearDevicesAreDealtOut) {
  Machine machine;
  RailQuestion question;
  question.root = machine.root();
  question.local_ranks = 4;
  for (int i = 0; i < 4; ++i) {
    question.gpus.push_back("0000:" + hex2(0x21 + i) + ":00.0");
    machine.pci("pci0000:10/0000:10:01.0/" + question.gpus.back());
    const std::string where = "pci0000:10/0000:10:02.0/0000:" + hex2(0x31 + i) + ":00.0";
    machine.pci(where);
    machine.infiniband("mlx5_" + std::to_string(i), where);
  }
  EXPECT_THAT(names_of(choose_rails(question)),
              ElementsAre("mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "mlx5_3:1"));
}

TEST(Rails, SlowVirtualAndBondedDevicesStandAside) {
  EightByEight dgx;
  const std::string near = "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/";
  dgx.machine.pci(near + "0000:1a:00.0");
  dgx.machine.infiniband("aaa_slow", near + "0000:1a:00.0", "4: ACTIVE", "100 Gb/sec (4X EDR)");
  dgx.machine.pci(near + "0000:1b:00.0");
  dgx.machine.mark_virtual(near + "0000:1b:00.0");
  dgx.machine.infiniband("aaa_virtual", near + "0000:1b:00.0");
  dgx.machine.pci(near + "0000:1c:00.0");
  dgx.machine.infiniband("aaa_bond_0", near + "0000:1c:00.0");
  EXPECT_EQ(names_of(choose_rails(dgx.question()))[0], "mlx5_7:1");

  Machine cloud;  // where there are only virtual functions, they serve
  cloud.pci("pci0000:10/0000:11:00.0");
  cloud.mark_virtual("pci0000:10/0000:11:00.0");
  cloud.infiniband("mlx5_9", "pci0000:10/0000:11:00.0");
  RailQuestion question;
  question.root = cloud.root();
  EXPECT_THAT(names_of(choose_rails(question)), ElementsAre("mlx5_9:1"));
}

TEST(Rails, AListByHandOverridesAndIsDealtInTurn) {
  EightByEight dgx;
  dgx.machine.interface("rail0");
  RailQuestion question = dgx.question();
  question.named = "mlx5_{0,2-3}, rail0";
  const auto choices = choose_rails(question);
  EXPECT_THAT(names_of(choices), ElementsAre("mlx5_0:1", "mlx5_2:1", "mlx5_3:1", "rail0",
                                             "mlx5_0:1", "mlx5_2:1", "mlx5_3:1", "rail0"));
  EXPECT_FALSE(choices.value()[3].device.rdma);
  EXPECT_THAT(rails_of(choices), ElementsAre(0, 1, 2, 3, 0, 1, 2, 3));

  question.named = "mlx5_11";
  EXPECT_THAT(choose_rails(question).status().message(),
              HasSubstr("names mlx5_11, and there is no such device"));
  dgx.machine.port_state("mlx5_1", "1: DOWN");
  question.named = "mlx5_1:1";
  EXPECT_THAT(choose_rails(question).status().message(), HasSubstr("whose port is not active"));
}

TEST(Rails, WrongListsAreNamed) {
  EXPECT_THAT(spelled_rails("mlx5_{0,3,4}:1").value(),
              ElementsAre("mlx5_0:1", "mlx5_3:1", "mlx5_4:1"));
  EXPECT_THAT(spelled_rails("rail{0-2},eth0").value(),
              ElementsAre("rail0", "rail1", "rail2", "eth0"));
  for (const char* wrong : {"a{0", "a}0{", "a{{0}}", "a{x}", "a{3-1}", "a{}", "a,,b", ""}) {
    const auto spelled = spelled_rails(wrong);
    ASSERT_FALSE(spelled.is_ok()) << wrong;
    EXPECT_EQ(spelled.status().kind(), ErrorKind::kInvalidUse);
    EXPECT_THAT(spelled.status().message(), HasSubstr("TIDE_RAILS='" + std::string(wrong) + "'"));
  }
}

TEST(Rails, WithoutNicsTheRouteDecides) {
  const Machine machine;
  RailQuestion question;
  question.root = machine.root();
  question.local_ranks = 2;
  question.peer_address = "127.0.0.1";
  const auto choices = choose_rails(question);
  EXPECT_THAT(names_of(choices), ElementsAre("lo", "lo"));
  EXPECT_THAT(choices.value()[1].note, HasSubstr("2 local ranks share lo"));
  question.peer_address = "not an address";
  EXPECT_THAT(choose_rails(question).status().message(),
              HasSubstr("no interface leads to 'not an address'"));
}

TEST(Rails, AGpuThatIsNotThereIsAnError) {
  const EightByEight dgx;
  RailQuestion question = dgx.question();
  question.gpus[5] = "0000:ff:00.0";
  EXPECT_THAT(choose_rails(question).status().message(), HasSubstr("GPU 0000:ff:00.0 is not in"));
}

}  // namespace
}  // namespace tide
