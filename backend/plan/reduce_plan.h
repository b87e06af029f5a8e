// Reduce inside one node: every rank owns its shard, receives the other ranks' slices of it, and
// adds them in fp32.
//
// Leased staging (the slot that the group has just vacated): one chunk, one area. Worked example,
// 3 ranks, rank 1:
//   reduce_push  signal lease_credit to all                          "my staging is free"
//   reduce_push  wait lease_credit from 2
//   reduce_push  copy gradient's places of shard 2 -> staging[0][1] of 2; signal reduce_arrival
//   reduce_push  wait lease_credit from 0
//   reduce_push  copy gradient's places of shard 0 -> staging[0][1] of 0; signal reduce_arrival
//   sum          wait reduce_arrival from 0, from 2
//   sum          accumulate (own slice straight from the gradient) -> output
// A large chunk is divided into `sums` parts, each pushed to all peers and signalled before the
// next, so that the first sum runs while the second part travels.
//
// Area staging: the shards are cut into nearly equal chunks of at most staging_slice_bytes packed
// bytes a slice; chunk c uses area c % 2. Credits (reduce_credit) come from the sum queue, so they
// stand behind every earlier call's sums:
//   sum          signal reduce_credit to all                  both areas are free
//   ...          push chunk 0, push chunk 1, sum chunk 0, signal reduce_credit, push chunk 2, ...
//
// Elements of the shard past valid_numel are not sent; the accumulate writes zeros there (or adds
// nothing). Only `subset` parameters (ascending indices of the layout) take part; the layout's
// other parameters are not touched.
#pragma once

#include <vector>

#include "backend/plan/program.h"

namespace tide {

struct ReduceOptions {
  std::vector<int> subset;    // parameters with gradients
  std::vector<DType> dtypes;  // of those gradients, parallel to subset
  int areas = 2;              // 1 (leased) or 2 (area)
  // Of one slice of one area. Leased: not used, the caller has seen to it that packed_shard_bytes()
  // of every rank fit.
  int64_t staging_slice_bytes = 0;
  int sums = 2;  // least number of parts (leased) or chunks (area) of a large reduce
  bool operator==(const ReduceOptions&) const = default;
};

// A reduce is divided for the sake of overlap only into parts of at least this many packed bytes.
inline constexpr int64_t kSmallestSumBytes = 256 << 10;

// Packed bytes of the subset's whole shard in these dtypes, as plan_reduce packs it (64-byte
// aligned per piece).
int64_t packed_shard_bytes(const GroupLayout& layout, const ReduceOptions& options);

Program plan_reduce(const GroupLayout& layout, int rank, const ReduceOptions& options);

}  // namespace tide
