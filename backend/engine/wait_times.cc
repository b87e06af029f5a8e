#include "backend/engine/wait_times.h"

#include <algorithm>
#include <bit>

#include "backend/engine/json_text.h"

namespace tide {

void WaitTimes::add(const OperationState& operation, const char* cause, int from,
                    uint64_t microseconds) {
  const int bucket = std::min<int>(std::bit_width(microseconds), kBuckets - 1);
  std::lock_guard<std::mutex> lock(mutex_);
  Sums& sums = sums_[{operation.subject(), call_kind_name(operation.record().kind)}];
  sums.waits += 1;
  sums.microseconds += microseconds;
  sums.causes[cause] += microseconds;
  sums.ranks.resize(static_cast<size_t>(ranks_));
  sums.ranks[static_cast<size_t>(from)] += microseconds;
  sums.histogram[static_cast<size_t>(bucket)] += 1;
}

std::string WaitTimes::to_json() const {
  const auto list = [](const auto& numbers) {
    std::string text = "[";
    for (const uint64_t number : numbers)
      text += (text.size() > 1 ? ", " : "") + std::to_string(number);
    return text + "]";
  };
  std::lock_guard<std::mutex> lock(mutex_);
  std::string json = "[";
  for (const auto& [key, sums] : sums_) {
    std::string causes;
    for (const auto& [cause, microseconds] : sums.causes)
      causes += (causes.empty() ? "" : ", ") + quoted(cause) + ": " + std::to_string(microseconds);
    json += (json.size() > 1 ? ", " : "") + std::string("{\"subject\": ") + quoted(key.first) +
            ", \"kind\": " + quoted(key.second) + ", \"waits\": " + std::to_string(sums.waits) +
            ", \"microseconds\": " + std::to_string(sums.microseconds) + ", \"causes\": {" +
            causes + "}, \"ranks\": " + list(sums.ranks) +
            ", \"histogram\": " + list(sums.histogram) + "}";
  }
  return json + "]";
}

}  // namespace tide
