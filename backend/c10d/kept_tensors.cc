#include "backend/c10d/kept_tensors.h"

#include <utility>

namespace tide {

void KeptTensors::add(uint64_t key, std::shared_ptr<Operation> operation,
                      std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs) {
  std::lock_guard<std::mutex> lock(mutex_);
  entries_[key] = {std::move(operation), std::move(inputs), std::move(outputs)};
}

void KeptTensors::drop_inputs(uint64_t key) {
  std::vector<at::Tensor> dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = entries_.find(key);
  if (found != entries_.end()) dropped.swap(found->second.inputs);
}

void KeptTensors::drop(uint64_t key) {
  std::map<uint64_t, Entry>::node_type dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  dropped = entries_.extract(key);
}

void KeptTensors::bury(c10::intrusive_ptr<c10::ivalue::Future> future,
                       std::vector<at::Tensor> outputs) {
  std::lock_guard<std::mutex> lock(mutex_);
  buried_.emplace_back(std::move(future), std::move(outputs));
}

void KeptTensors::sweep(bool all) {
  std::vector<Entry> dropped;
  decltype(buried_) buried;
  std::lock_guard<std::mutex> lock(mutex_);
  buried.swap(buried_);
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    if (all || entry->second.operation->is_done()) {
      dropped.push_back(std::move(entry->second));
      entry = entries_.erase(entry);
    } else {
      ++entry;
    }
  }
}

}  // namespace tide
