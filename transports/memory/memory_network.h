// The network inside one process: nodes are threads, a wire thread carries puts and signals. For
// tests of everything above the seam, and the reference for what a network does. Nothing is sent
// before the wire takes it: a put's source is read when its bytes land, so that a source reused
// before drain() shows as wrong data.
//
// `fate` is asked for every message (a put with a head is two: head, then the rest) by the posting
// thread. Delays make messages overtake each other; the rest of a put never lands before its head.
// A dropped message never arrives and its post is never over, as with a black hole.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "transports/network.h"

namespace tide {

struct MemoryMessage {
  int from = 0;
  int to = 0;
  Event event;
  int64_t amount = 0;
};
struct MemoryFate {
  std::chrono::microseconds delay{0};
  bool drop = false;
};

struct MemoryNetworkOptions {
  std::string name = "memory";  // of the group, for messages
  // Accept MemoryKind::kCuda (the bytes are the processor's all the same).
  bool cuda_memory = false;
  std::function<MemoryFate(const MemoryMessage&)> fate;
  // Asked by each node in add_region; an error is that node's refusal. For tests of votes.
  std::function<Status(int node, const MemoryBlock& block)> refuse_region;
};

// networks[n] is node n's.
std::vector<std::unique_ptr<Network>> make_memory_networks(
    int nodes, const MemoryNetworkOptions& options = {});

// A fate that delays each message by 0 to `most`, the same sequence for the same seed.
std::function<MemoryFate(const MemoryMessage&)> random_delays(uint64_t seed,
                                                              std::chrono::microseconds most);

// What peers see when a node's process dies: its messages under way are lost, its network ends
// without a goodbye. `network` came from make_memory_networks; its own calls return an error from
// then on.
void break_memory_network(Network& network);

}  // namespace tide
