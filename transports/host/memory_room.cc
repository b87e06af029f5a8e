#include "transports/host/memory_room.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

namespace tide {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// "max" and numbers beyond 64 bits are no limit.
int64_t read_number(const std::string& path, int64_t otherwise) {
  std::ifstream file(path);
  int64_t value = 0;
  return file >> value ? value : otherwise;
}

// The value of "name 123" or "name: 123 kB" in a file of such lines.
int64_t read_field(const std::string& path, const std::string& name, int64_t otherwise) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string found;
    int64_t value = 0;
    std::string unit;
    if (words >> found >> value && found == name)
      return words >> unit && unit == "kB" ? value * 1024 : value;
  }
  return otherwise;
}

// What is left in one control group; file pages that it can drop count as left.
int64_t group_room(const std::string& folder, const char* limit_file, const char* usage_file,
                   const char* file_field) {
  const int64_t limit = read_number(folder + limit_file, kNoLimit);
  const int64_t usage = read_number(folder + usage_file, 0);
  if (limit == kNoLimit) return kNoLimit;
  const int64_t droppable = read_field(folder + "memory.stat", file_field, 0);
  return std::max<int64_t>(0, limit - std::max<int64_t>(0, usage - droppable));
}

// Of the group at `path` below `mount` and of all its parents; inside a container only some of them
// are visible.
int64_t groups_room(const std::string& mount, std::string path, const char* limit_file,
                    const char* usage_file, const char* file_field) {
  int64_t room = kNoLimit;
  while (true) {
    const std::string folder = mount + path + (path.empty() || path.back() != '/' ? "/" : "");
    room = std::min(room, group_room(folder, limit_file, usage_file, file_field));
    const size_t slash = path.rfind('/');
    if (path.empty() || slash == std::string::npos) return room;
    path.erase(slash);
  }
}

}  // namespace

int64_t memory_room_bytes(const std::string& root) {
  int64_t room = read_field(root + "proc/meminfo", "MemAvailable:", kNoLimit);
  std::ifstream groups(root + "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "4:memory:/path" or "0::/path"
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      for (const char* mount : {"sys/fs/cgroup", "sys/fs/cgroup/unified"}) {
        room = std::min(
            room, groups_room(root + mount, path, "memory.max", "memory.current", "inactive_file"));
      }
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      room =
          std::min(room, groups_room(root + "sys/fs/cgroup/memory", path, "memory.limit_in_bytes",
                                     "memory.usage_in_bytes", "total_inactive_file"));
    }
  }
  return room;
}

}  // namespace tide
