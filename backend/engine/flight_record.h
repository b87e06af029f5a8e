// The last operations of a group, for dumps: what each was, where it stands, and what it waits for.
//
// Also the group's memory of what is in flight: an operation's place is taken again kRecords calls
// later, which the calling thread does only when it is done. Thread-safe.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/engine/engine_context.h"
#include "backend/engine/operation_state.h"

namespace tide {

class FlightRecord {
 public:
  FlightRecord() : operations_(kRecords) {}

  // The operation that `sequence` would overwrite; null when there is none.
  std::shared_ptr<OperationState> at(uint64_t sequence) const;
  void add(std::shared_ptr<OperationState> operation);

  // Those that are not done, in call order.
  std::vector<std::shared_ptr<OperationState>> in_flight() const;

  // {"group": ..., "rank": ..., "error": ..., "operations": [{"sequence", "kind", "subject",
  // "state", "bytes", "microseconds", "waited_microseconds", "longest_for_rank", "waiting",
  // "error"}, ...]} with the last `count` operations,
  // oldest first. Times run from the call.
  std::string to_json(const EngineContext& context, int count) const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<OperationState>> operations_;  // by sequence % kRecords
  uint64_t next_ = 0;                                        // one past the last sequence added
};

}  // namespace tide
