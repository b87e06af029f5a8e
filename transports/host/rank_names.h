// How messages name the ranks of a fabric that serves a part of a group: by their numbers in the
// whole group.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tide {

class RankNames {
 public:
  // numbers[r] is what messages say for the fabric's rank r; empty: r itself.
  explicit RankNames(std::vector<int> numbers = {}) : numbers_(std::move(numbers)) {}

  int number(int rank) const {
    return numbers_.empty() ? rank : numbers_[static_cast<size_t>(rank)];
  }
  // "rank 5"
  std::string of(int rank) const { return "rank " + std::to_string(number(rank)); }

 private:
  std::vector<int> numbers_;
};

}  // namespace tide
