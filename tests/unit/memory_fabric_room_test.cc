// How much memory is left, read from made-up system files.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "transports/host/memory_room.h"

namespace tide {
namespace {

class MemoryRoom : public testing::Test {
 protected:
  MemoryRoom() {
    char path[] = "/tmp/tide-test-room-XXXXXX";
    root_ = std::string(::mkdtemp(path)) + "/";
  }
  ~MemoryRoom() override { std::filesystem::remove_all(root_); }

  void file(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  void machine(int64_t available_kib) {
    file("proc/meminfo", "MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable:   " +
                             std::to_string(available_kib) + " kB\n");
  }
  std::string root_;
};

TEST_F(MemoryRoom, WithoutGroupsTheMachineDecides) {
  machine(1000);
  EXPECT_EQ(memory_room_bytes(root_), 1000 * 1024);
}

TEST_F(MemoryRoom, AGroupsLimitAndThoseOfItsParentsCount) {
  machine(1'000'000);
  file("proc/self/cgroup", "0::/outer/inner\n");
  file("sys/fs/cgroup/outer/inner/memory.max", "max\n");
  file("sys/fs/cgroup/outer/inner/memory.current", "5000\n");
  EXPECT_EQ(memory_room_bytes(root_), 1'000'000 * 1024);
  file("sys/fs/cgroup/outer/memory.max", "9000\n");
  file("sys/fs/cgroup/outer/memory.current", "6000\n");
  EXPECT_EQ(memory_room_bytes(root_), 3000);
  file("sys/fs/cgroup/outer/memory.stat", "anon 7\ninactive_file 1000\nfile 3\n");
  EXPECT_EQ(memory_room_bytes(root_), 4000);
}

TEST_F(MemoryRoom, TheOlderKindOfGroupsCounts) {
  machine(1'000'000);
  file("proc/self/cgroup", "5:devices:/x\n4:cpu,memory:/job\n0::/\n");
  file("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "8000\n");
  file("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "9000\n");
  EXPECT_EQ(memory_room_bytes(root_), 0);
  file("sys/fs/cgroup/memory/job/memory.limit_in_bytes",
       "9223372036854771712\n");  // how "none" is written there
  EXPECT_EQ(memory_room_bytes(root_), 1'000'000 * 1024);
}

TEST_F(MemoryRoom, InsideAContainerTheGroupIsAtTheTop) {
  machine(1'000'000);
  file("proc/self/cgroup", "0::/elsewhere\n");
  file("sys/fs/cgroup/memory.max", "7000\n");
  file("sys/fs/cgroup/memory.current", "2000\n");
  EXPECT_EQ(memory_room_bytes(root_), 5000);
}

TEST(MemoryRoomHere, IsPositive) { EXPECT_GT(memory_room_bytes(), 0); }

}  // namespace
}  // namespace tide
