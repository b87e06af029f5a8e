// A small, stable hash: the same sequence of numbers gives the same value on every machine and in
// every build.
#pragma once

#include <cstdint>

namespace tide {

inline constexpr uint64_t kHashSeed = 0x9e3779b97f4a7c15ull;

// Folds `value` into `hash`; the order of the calls matters.
inline uint64_t hash_combine(uint64_t hash, uint64_t value) {
  uint64_t mixed = hash ^ (value + kHashSeed + (hash << 6) + (hash >> 2));
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
  return mixed ^ (mixed >> 31);
}

}  // namespace tide
