// Worked example, doubling, M = 8, shards of s bytes, pacing off, rate B, arrival time A after the
// last byte: rounds of s, 2 s and 4 s, each begun when the one before has arrived whole:
//   (s / B + A) + (2 s / B + A) + (4 s / B + A) = 7 s / B + 3 A
// Ring: 7 (s / B + A). Direct: nothing is forwarded, 7 s / B + A.
#include "backend/plan/cost_model.h"

#include <algorithm>

namespace tide {
namespace {

constexpr double kWorthIt = 0.98;

// One rank's view of a schedule in which all ranks do the same at the same time.
double schedule_s(const RailModel& rail, const std::vector<RailRound>& rounds, int64_t shard_bytes,
                  Pacing pacing, int64_t head_bytes) {
  const double told_s = rail.latency_s + rail.message_s;  // a grant or a confirm
  std::vector<double> arrived(rounds.size() + 1, 0);      // by offset; 0 is the own shard
  double port_free = told_s;                              // the first grant
  double allowed = told_s;
  double end = 0;
  for (const RailRound& round : rounds) {
    const double bytes = static_cast<double>(round.shards) * static_cast<double>(shard_bytes);
    arrived.resize(std::max<size_t>(arrived.size(), round.first_received + round.shards), 0);
    double start = std::max(port_free, allowed);
    for (int i = round.first_sent; i < round.needed(); ++i) start = std::max(start, arrived[i]);
    const double head = std::min(bytes, static_cast<double>(head_bytes));
    port_free = start + bytes / rail.rate;
    end = port_free + rail.arrival_s();
    for (int i = 0; i < round.shards; ++i) arrived[round.first_received + i] = end;
    if (pacing == Pacing::kConfirmWhole) allowed = end + told_s;
    if (pacing == Pacing::kConfirmHead || pacing == Pacing::kGrant) {
      allowed = start + head / rail.rate + rail.arrival_s() + told_s;
    }
  }
  return end;
}

}  // namespace

const std::vector<Constant>& cost_constants() {
  static const std::vector<Constant> constants = {
      kPushRate,        kPushStart,        kBatchStart,       kBatchPieces,   kSignalHop,
      kCreditHop,       kKernelStart,      kSumRatePerCta,    kSumRateLimit,  kCopyRatePerCta,
      kPullRatePerCta,  kKernelCtas,       kCombineCtas,      kCopyInRate,    kCopyOutRate,
      kChunkCatRate,    kNcclGatherPerCta, kNcclReducePerCta, kNcclCtas,      kNcclGatherShare,
      kNcclReduceShare, kNcclHop,          kTrafficSlowdown,  kProductRate,   kAttentionRate,
      kOtherKernels,    kOptimizer,        kMeasuredHbm,      kMeasuredFlops, kNicRate,
      kNicLatency,      kNicMessage,       kArrivalTrips};
  return constants;
}

double push_start_s(const FabricModel& fabric, int64_t pieces) {
  if (pieces <= 1) return fabric.push_start_s;
  const int64_t calls = (pieces + fabric.batch_pieces - 1) / fabric.batch_pieces;
  return static_cast<double>(calls) * fabric.batch_start_s;
}

double sum_s(const FabricModel& fabric, int64_t bytes, int ctas) {
  return static_cast<double>(bytes) /
         std::min(ctas * fabric.sum_rate_per_cta, fabric.sum_rate_limit);
}

double copy_s(const FabricModel& fabric, int64_t bytes, int ctas) {
  return static_cast<double>(bytes) /
         std::min(ctas * fabric.copy_rate_per_cta, fabric.sum_rate_limit / 2);
}

double kernel_wait_s(const FabricModel& fabric, int ctas) {
  const bool waits = fabric.product_s > 0 && ctas > fabric.free_sms;
  return fabric.kernel_start_s + (waits ? fabric.product_s / 2 : 0);
}

GatherEstimate estimate_gather(const RailModel& rail, int nodes, int64_t shard_bytes, Pacing pacing,
                               int64_t head_bytes) {
  const auto estimate = [&](GatherSchedule schedule) {
    return schedule_s(rail, rail_rounds(schedule, nodes, 0), shard_bytes, pacing, head_bytes);
  };
  return {estimate(GatherSchedule::kDoubling), estimate(GatherSchedule::kRing),
          estimate(GatherSchedule::kDirect)};
}

GatherSchedule choose_schedule(const RailModel& rail, int nodes, int64_t shard_bytes, Pacing pacing,
                               int64_t head_bytes) {
  if (nodes < 3) return GatherSchedule::kDoubling;
  const GatherEstimate estimate = estimate_gather(rail, nodes, shard_bytes, pacing, head_bytes);
  const double bar = kWorthIt * estimate.doubling_s;
  if (estimate.direct_s < bar && estimate.direct_s <= estimate.ring_s) {
    return GatherSchedule::kDirect;
  }
  return estimate.ring_s < bar ? GatherSchedule::kRing : GatherSchedule::kDoubling;
}

}  // namespace tide
