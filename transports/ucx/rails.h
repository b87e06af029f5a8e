// Which network device is whose: a rail for each local rank, found from what the kernel says about
// the machine. Every rank computes the same answer from the same tree.
//
// Machines with InfiniBand or RoCE devices: each GPU, in local order, takes the active device whose
// sysfs path shares most with its own, among equals the one with fewest GPUs so far, among these
// the first by name. Devices slower than half of the fastest, virtual functions and bonds stand
// aside while others are there. Without GPUs the devices are dealt in turn. Machines without such
// devices: the interface that leads to the peer's address, for all local ranks. TIDE_RAILS
// overrides both: a list of devices ("mlx5_0,mlx5_3:1" or "rail0,rail1"), one for each local rank;
// with fewer devices than ranks it is dealt in turn. A range in braces is spelled out: "rail{0-3}",
// "mlx5_{0,3,4}:1".
#pragma once

#include <string>
#include <vector>

#include "backend/base/status.h"

namespace tide {

struct RailDevice {
  std::string name;  // "mlx5_0:1", "eth0"
  bool rdma = false;
  std::string path;  // resolved sysfs path of its PCI device; empty for interfaces without one
  bool active = false;
  double gigabits = 0;
  bool stands_aside = false;  // virtual function or bond
};

struct RailChoice {
  RailDevice device;
  int rail =
      0;  // index of the device among the distinct devices chosen on this node, in order of choice
  std::string note;  // a sentence if the rail is shared, far from its GPU, or was named by hand
};

struct RailQuestion {
  std::string root = "/sys";
  int local_ranks = 1;
  std::vector<std::string> gpus;  // PCI addresses in local order, "0000:3b:00.0"; empty: no GPUs
  std::string named;              // TIDE_RAILS
  std::string peer_address;       // of any other node, for machines without RDMA devices
};

// One choice for each local rank, or why there is none.
Result<std::vector<RailChoice>> choose_rails(const RailQuestion& question);

// The RDMA ports of a machine, by name.
std::vector<RailDevice> rdma_devices(const std::string& root);

// The list that a TIDE_RAILS text spells; an error names what is wrong with it.
Result<std::vector<std::string>> spelled_rails(const std::string& text);

// The own address from which the kernel would talk to `address` (a name, IPv4 or IPv6), and the
// interface that carries it.
Result<std::string> own_address_towards(const std::string& address);
Result<std::string> interface_towards(const std::string& address);

}  // namespace tide
