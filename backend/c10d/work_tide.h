// One of tide's own collectives as c10d sees it.
//
// The group's KeptTensors hold the tensors until the operation is done, also when the Work is
// dropped before; the inputs only until wait_read() has returned. On a GPU waits order the calling
// thread's current stream behind the operation and return at once; tensors are then the caller's to
// keep, as with NCCL. Waits release nothing themselves
// (c10d's bindings call without the GIL), and look for signals every 100 ms. Futures complete on
// the engine's completion thread, which never takes the GIL by itself; a Python callback of the
// future takes it for itself.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "backend/c10d/kept_tensors.h"
#include "backend/engine/group.h"

namespace tide {

class WorkTide : public c10d::Work {
 public:
  struct Call {
    std::shared_ptr<Operation> operation;
    c10d::OpType type = c10d::OpType::UNKNOWN;
    std::string group;  // name, for messages
    int rank = 0;
    uint64_t sequence = 0;
    std::vector<at::Tensor> outputs;  // result() and the future's value
    std::vector<at::Tensor> inputs;   // handed on to `kept`
    std::shared_ptr<KeptTensors> kept;
    c10::Device device{c10::kCPU};
    std::shared_ptr<Group> engine;
    std::chrono::milliseconds timeout{0};
    std::function<void()> check_signals;  // throws to interrupt a wait
  };

  explicit WorkTide(Call call);
  ~WorkTide() override;

  bool isCompleted() override { return call_.operation->is_done(); }
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return call_.outputs; }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  // Throws DistBackendError when the operation failed, or is not done after `timeout` (it goes on
  // then).
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return call_.sequence; }
  // Virtual in newer torch only, so not marked as overrides.
  std::chrono::milliseconds getTimeout() const { return call_.timeout; }
  uint64_t getCompletionKey() const { return completion_key_; }

  // Until the inputs have been read; they may be freed or overwritten then (on a GPU: behind the
  // current stream), and are no longer held here.
  void wait_read();

 private:
  void order_current_stream(bool reads_only);
  c10::intrusive_ptr<c10::ivalue::Future> stream_future();

  Call call_;
  const uint64_t completion_key_;  // never reused in this process
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A gather of a planned group: which slot its parameters live in.
class GatherWork : public WorkTide {
 public:
  GatherWork(Call call, int slot) : WorkTide(std::move(call)), slot(slot) {}
  const int slot;
};

// A reduce of a planned group.
class ReduceWork : public WorkTide {
 public:
  using WorkTide::WorkTide;
};

}  // namespace tide
