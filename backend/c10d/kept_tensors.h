// Tensors of operations in flight, kept alive whoever drops the Work, and let go on callers'
// threads only: a tensor may own a Python object, and the engine's threads must never take the GIL
// (after the interpreter began to end, taking it would end the process).
//
// An entry goes when its Work was waited for, else with the first sweep after its operation was
// done: every call of the group sweeps, and so does its end. Thread-safe.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/engine/operation.h"

namespace tide {

class KeptTensors {
 public:
  void add(uint64_t key, std::shared_ptr<Operation> operation, std::vector<at::Tensor> inputs,
           std::vector<at::Tensor> outputs);
  void drop_inputs(uint64_t key);
  void drop(uint64_t key);

  // Takes a future that has completed, and what its value was made of, from the completing thread.
  void bury(c10::intrusive_ptr<c10::ivalue::Future> future, std::vector<at::Tensor> outputs);

  // Lets go of what is done; with `all`, of everything (no operation runs any more).
  void sweep(bool all = false);

 private:
  struct Entry {
    std::shared_ptr<Operation> operation;
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
  };

  std::mutex mutex_;  // never held while a tensor goes
  std::map<uint64_t, Entry> entries_;
  std::vector<std::pair<c10::intrusive_ptr<c10::ivalue::Future>, std::vector<at::Tensor>>> buried_;
};

}  // namespace tide
