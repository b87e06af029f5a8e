// How ranks exchange what each of them wants, before they decide alike: every rank's ballot, by
// rank, over the store.
//
// Ballots are bytes; each vote of a group has a number, so keys never meet. A decision is a pure
// function of all ballots, and so equal on all ranks without a second exchange. Not thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/base/status.h"
#include "transports/fabric.h"

namespace tide {

class Vote {
 public:
  Vote(std::shared_ptr<KeyValueStore> store, int rank, int ranks)
      : store_(std::move(store)), rank_(rank), ranks_(ranks) {}

  // Collective. `check` is asked about every 200 ms while a ballot is missing; its error ends the
  // vote. kTimeout names the first rank whose ballot did not come before the deadline.
  Result<std::vector<std::string>> exchange(const std::string& ballot, Deadline deadline,
                                            const std::function<Status(int missing_rank)>& check);

 private:
  std::string key(int64_t number, int rank) const {
    return "vote/" + std::to_string(number) + "/" + std::to_string(rank);
  }

  std::shared_ptr<KeyValueStore> store_;
  int rank_;
  int ranks_;
  int64_t number_ = 0;
};

}  // namespace tide
