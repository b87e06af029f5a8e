#include <unistd.h>

#include <fstream>
#include <string>

#include "transports/host/host_fabric.h"

namespace tide {

std::string node_identity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  char space[64] = {};
  if (::readlink("/proc/self/ns/net", space, sizeof(space) - 1) < 0) space[0] = '\0';
  return boot + "/" + space;
}

}  // namespace tide
