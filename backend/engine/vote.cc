#include "backend/engine/vote.h"

#include <algorithm>
#include <utility>

namespace tide {
namespace {

constexpr std::chrono::milliseconds kCheckInterval{200};

}  // namespace

Result<std::vector<std::string>> Vote::exchange(
    const std::string& ballot, Deadline deadline,
    const std::function<Status(int missing_rank)>& check) {
  ++number_;
  std::vector<std::string> ballots(static_cast<size_t>(ranks_));
  ballots[static_cast<size_t>(rank_)] = ballot;
  if (ranks_ == 1) return ballots;
  TIDE_RETURN_IF_ERROR(store_->set(key(number_, rank_), ballot));
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank == rank_) continue;
    for (;;) {
      Result<std::string> answer =
          store_->get(key(number_, rank), std::min(deadline, Clock::now() + kCheckInterval));
      if (answer.is_ok()) {
        ballots[static_cast<size_t>(rank)] = std::move(answer.value());
        break;
      }
      if (answer.status().kind() != ErrorKind::kTimeout) return answer.status();
      TIDE_RETURN_IF_ERROR(check(rank));
      if (Clock::now() >= deadline) {
        return Status(ErrorKind::kTimeout, "no ballot of rank " + std::to_string(rank) +
                                               " in the vote: " + answer.status().message());
      }
    }
  }
  // Who sent a ballot of this vote has read all of the one before.
  if (number_ > 1) store_->remove(key(number_ - 1, rank_));
  return ballots;
}

}  // namespace tide
