#include "backend/engine/flight_record.h"

#include <algorithm>
#include <utility>

#include "backend/engine/json_text.h"

namespace tide {
namespace {

const char* phase_name(OperationState::Phase phase) {
  switch (phase) {
    case OperationState::Phase::kQueued:
      return "queued";
    case OperationState::Phase::kRunning:
      return "running";
    case OperationState::Phase::kDone:
      return "done";
    case OperationState::Phase::kFailed:
      return "failed";
  }
  return "";
}

std::string operation_json(const EngineContext& context, const OperationState& operation) {
  const OperationState::Phase phase = operation.phase();
  const OperationState::Times times = operation.times();
  const bool ended =
      phase == OperationState::Phase::kDone || phase == OperationState::Phase::kFailed;
  const auto duration = std::chrono::duration_cast<std::chrono::microseconds>(
      (ended ? times.done : Clock::now()) - times.queued);
  std::string json = "{\"sequence\": " + std::to_string(operation.record().sequence) +
                     ", \"kind\": \"" + call_kind_name(operation.record().kind) +
                     "\", \"subject\": " + quoted(operation.subject()) + ", \"state\": \"" +
                     phase_name(phase) +
                     "\", \"bytes\": " + std::to_string(operation.record().bytes) +
                     ", \"microseconds\": " + std::to_string(duration.count());
  if (const OperationState::Waited waited = operation.waited(); waited.microseconds > 0) {
    json += ", \"waited_microseconds\": " + std::to_string(waited.microseconds) +
            ", \"longest_for_rank\": " + std::to_string(waited.longest_for);
  }
  if (phase == OperationState::Phase::kRunning)
    json += ", \"waiting\": " + quoted(context.describe(operation));
  if (phase == OperationState::Phase::kFailed)
    json += ", \"error\": " + quoted(operation.status().to_string());
  return json + "}";
}

}  // namespace

std::shared_ptr<OperationState> FlightRecord::at(uint64_t sequence) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return operations_[sequence % kRecords];
}

void FlightRecord::add(std::shared_ptr<OperationState> operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t sequence = operation->record().sequence;
  next_ = sequence + 1;
  operations_[sequence % kRecords].swap(operation);
}

std::vector<std::shared_ptr<OperationState>> FlightRecord::in_flight() const {
  std::vector<std::shared_ptr<OperationState>> result;
  std::lock_guard<std::mutex> lock(mutex_);
  for (uint64_t i = 0; i < kRecords; ++i) {
    const std::shared_ptr<OperationState>& operation = operations_[(next_ + i) % kRecords];
    if (operation && !operation->is_done()) result.push_back(operation);
  }
  return result;
}

std::string FlightRecord::to_json(const EngineContext& context, int count) const {
  std::vector<std::shared_ptr<OperationState>> operations;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (uint64_t i = 0; i < kRecords; ++i) {
      if (const auto& operation = operations_[(next_ + i) % kRecords])
        operations.push_back(operation);
    }
  }
  const size_t wanted = std::min(operations.size(), static_cast<size_t>(std::max(0, count)));
  const Status error = context.failure.status();
  std::string json = "{\"group\": " + quoted(context.name()) +
                     ", \"rank\": " + std::to_string(context.rank()) +
                     ", \"ranks\": " + std::to_string(context.ranks()) +
                     ", \"error\": " + (error.is_ok() ? "null" : quoted(error.to_string())) +
                     ", \"operations\": [";
  for (size_t i = operations.size() - wanted; i < operations.size(); ++i) {
    if (i > operations.size() - wanted) json += ", ";
    json += operation_json(context, *operations[i]);
  }
  return json + "]}";
}

}  // namespace tide
