// How long a group's queues waited on the host, for whom and for what: sums since creation.
//
// Keyed by (subject, kind of call): one FSDP2 group's gathers, say. A wait that was satisfied when
// its queue came to it costs and counts nothing; waits that a device's streams do are not seen
// here. Thread-safe: one short lock for each wait that really waited.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backend/engine/operation_state.h"

namespace tide {

class WaitTimes {
 public:
  // Bucket b of a histogram counts waits of less than 2^b microseconds, and of 2^(b-1) or more.
  static constexpr int kBuckets = 24;

  explicit WaitTimes(int ranks) : ranks_(ranks) {}

  // `cause`: a counter's name, a literal. `from`: the rank that was waited for.
  void add(const OperationState& operation, const char* cause, int from, uint64_t microseconds);

  // [{"subject", "kind", "waits", "microseconds", "causes": {cause: microseconds}, "ranks":
  // [microseconds by rank], "histogram": [waits by bucket]}, ...]
  std::string to_json() const;

 private:
  struct Sums {
    uint64_t waits = 0;
    uint64_t microseconds = 0;
    std::map<std::string, uint64_t> causes;
    std::vector<uint64_t> ranks;
    std::array<uint64_t, kBuckets> histogram = {};
  };

  const int ranks_;
  mutable std::mutex mutex_;
  std::map<std::pair<std::string, std::string>, Sums> sums_;
};

}  // namespace tide
