// Reduce inside one node: every rank owns its shard, receives the other ranks' slices of it, and adds them in fp32.
//
// The shards are cut into chunks of at most staging_slice_bytes packed bytes a slice; chunk c uses area c % areas.
// Leased staging (the slot that the group has just vacated): one chunk, one area. Worked example, 3 ranks, rank 1:
//   reduce_push  signal reduce_credit to all                  "my staging is free" (before the first chunk)
//   reduce_push  wait reduce_credit from 2; copy gradient's places of shard 2 -> staging[0][1] of 2; signal reduce_arrival
//   reduce_push  wait reduce_credit from 0; copy gradient's places of shard 0 -> staging[0][1] of 0; signal reduce_arrival
//   sum          wait reduce_arrival from 0, from 2; accumulate (own slice straight from the gradient) -> output
//   sum          signal reduce_credit to all                  (only if a later chunk uses this area)
//
// Elements of the shard past valid_numel are not sent; the accumulate writes zeros there (or adds nothing).
// Only `subset` parameters (ascending indices of the layout) take part; the layout's other parameters are not touched.
#pragma once

#include <vector>

#include "backend/plan/program.h"

namespace tide {

struct ReduceOptions {
  std::vector<int> subset;          // parameters with gradients
  std::vector<DType> dtypes;        // of those gradients, parallel to subset
  int areas = 2;                    // 1 (leased) or 2 (area)
  int64_t staging_slice_bytes = 0;  // bytes of one slice of one area; leased: the whole subset must fit
  int sums = 2;                     // leased: accumulate steps that the chunk is divided into (fewer when it is small)
};

// Packed bytes of the subset's whole shard in these dtypes, as plan_reduce packs it (64-byte aligned per piece).
int64_t packed_shard_bytes(const GroupLayout& layout, const ReduceOptions& options);

Program plan_reduce(const GroupLayout& layout, int rank, const ReduceOptions& options);

}  // namespace tide
