// A CUDA driver in ordinary memory: what the fabric's logic is tested with where there is no GPU.
//
// Allocations are memory files, so sharing by descriptor and mapping are real. A stream is a thread
// with a queue; a wait holds its stream until the word is reached. Kernels run the processor's
// twins over the same lists. Each rank takes api(process) with a number of its own; entries of the
// table are std::function, so a test replaces the call that it wants to fail. What the real driver
// refuses and a careless program does not notice is refused here, and counted: calls without a
// current context, a stream write to another rank's memory, batches on no stream or of too many
// pieces.
//
// Thread-safe. The fake outlives every fabric made with it; destroying it ends all streams, also
// blocked ones.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "kernels/cuda_images.h"
#include "transports/cuda/driver_api.h"

namespace tide::cuda {

class FakeDriver {
 public:
  FakeDriver();
  ~FakeDriver();

  // Device d of every process has the UUID {d + 1, 0, ...}.
  DriverApi api(int process);
  static std::vector<KernelImage> images();

  // Wrong uses seen so far, one line each; empty when all went well.
  std::string misuses() const;
  uint64_t synchronisations() const { return synchronisations_.load(); }
  uint64_t copies() const { return copies_.load(); }
  uint64_t batches() const { return batches_.load(); }
  uint64_t launches() const { return launches_.load(); }
  uint64_t memsets_of_one_word() const { return one_word_memsets_.load(); }
  // Allocations, mappings and streams that nobody has given back.
  int live_objects() const;
  int multicast_creates() const;  // calls of it, refused ones too

  std::atomic<int> devices{2};
  std::atomic<bool> peer_access{true};
  std::atomic<bool> multicast{false};  // the attribute; the calls are always there
  std::atomic<bool> capturing{false};  // every stream records a graph

  class State;

 private:
  std::shared_ptr<State> state_;
  std::atomic<uint64_t> synchronisations_{0}, copies_{0}, batches_{0}, launches_{0},
      one_word_memsets_{0};
};

}  // namespace tide::cuda
