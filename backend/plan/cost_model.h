// What a step of a program costs on a described cluster. Pure; the numbers are those of
// cost_constants.h unless the description says otherwise. All times in seconds, rates in bytes a
// second.
//
// Worked example, gather inside a node of two H200, 1 GiB in all: credit 5.9 us, one copy of 512
// MiB 2.6 us + 536.9 MB / 392 GB/s = 1372 us, signal 6.2 us: 1384 us (measured: 1388).
#pragma once

#include <cstdint>

#include "backend/plan/cost_constants.h"
#include "backend/plan/program.h"
#include "backend/plan/rail_rounds.h"

namespace tide {

// Inside a node: every rank has one port in and one out, and one engine that copies.
struct FabricModel {
  double push_rate = kPushRate.value;
  double push_start_s = kPushStart.value;    // a copy of one run
  double batch_start_s = kBatchStart.value;  // several runs, up to batch_pieces
  int batch_pieces = static_cast<int>(kBatchPieces.value);
  double signal_s = kSignalHop.value;  // behind data, through the engine
  double credit_s = kCreditHop.value;  // past it; also a rank's signals to itself
  double kernel_start_s = kKernelStart.value;
  double sum_rate_per_cta = kSumRatePerCta.value;  // read and written
  double sum_rate_limit = kSumRateLimit.value;
  double copy_rate_per_cta = kCopyRatePerCta.value;  // copied
  double pull_rate_per_cta = kPullRatePerCta.value;  // over the node's links
  int kernel_ctas = static_cast<int>(kKernelCtas.value);
  int combine_ctas = static_cast<int>(kCombineCtas.value);
  int sms = 132;
  bool multicast = false;  // one copy reaches every rank of the node
  // Products of this length run back to back on all SMs but free_sms: a kernel waits half of one on
  // average (H200 pair: sums of 16 MiB chunks beside 1.54 ms products, one per 0.8 ms).
  double product_s = 0;
  int free_sms = 0;
};

// Between nodes: one adapter a rank.
struct RailModel {
  double rate = kNicRate.value;          // each way
  double latency_s = kNicLatency.value;  // one way
  double message_s = kNicMessage.value;
  double arrival_s() const { return kArrivalTrips.value * latency_s + message_s; }
};

struct ClusterModel {
  FabricModel fabric;
  RailModel rail;
};

// Time that the engine works on a copy of `pieces` runs before its bytes flow.
double push_start_s(const FabricModel& fabric, int64_t pieces);
// Time of a kernel that reads and writes so many bytes, without what it waits for.
double sum_s(const FabricModel& fabric, int64_t bytes, int ctas);
double copy_s(const FabricModel& fabric, int64_t bytes, int ctas);
// From launch to running.
double kernel_wait_s(const FabricModel& fabric, int ctas);

// Closed forms for a gather between `nodes` nodes over one rail, nothing else going on, equal
// shards, at least two nodes.
struct GatherEstimate {
  double doubling_s = 0;
  double ring_s = 0;
  double direct_s = 0;
};
GatherEstimate estimate_gather(const RailModel& rail, int nodes, int64_t shard_bytes, Pacing pacing,
                               int64_t head_bytes);

// The schedule that the estimate calls fastest; doubling where no other is at least 2 % faster.
// A function of its arguments alone: equal on all ranks where they are.
GatherSchedule choose_schedule(const RailModel& rail, int nodes, int64_t shard_bytes, Pacing pacing,
                               int64_t head_bytes);

}  // namespace tide
