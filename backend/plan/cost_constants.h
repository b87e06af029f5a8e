// The numbers that the cost model stands on, each with where it comes from. Nothing else in the
// project holds a time or a rate of a machine: the simulator, the choice of schedule and
// `tide simulate` all read them here.
//
// "H200 pair": two H200 GPUs joined by 18 NVLinks, driver 580, CUDA 13.0, medians of device events.
// "Rank 0 of 64": one H200 playing rank 0 of 64 over a fake process group. No number was chosen to
// fit a prediction; where one is computed from readings, the source says how.
#pragma once

#include <vector>

namespace tide {

struct Constant {
  const char* name;
  double value;
  const char* unit;
  const char* source;
};

// Copies and signals inside a node.
inline constexpr Constant kPushRate = {"push_rate", 392e9, "bytes/s",
                                       "H200 pair: pushes of 1 GiB, both ways busy"};
inline constexpr Constant kPushStart = {"push_start", 2.6e-6, "s",
                                        "H200 pair: one copy call, whatever its size"};
inline constexpr Constant kBatchStart = {"batch_start", 5.2e-6, "s",
                                         "H200 pair: one batch call, whatever its pieces"};
inline constexpr Constant kBatchPieces = {"batch_pieces", 128, "pieces",
                                          "H200 pair: larger batch calls crashed the driver"};
inline constexpr Constant kSignalHop = {
    "signal_hop", 6.2e-6, "s", "H200 pair: 4-byte copy until the peer's stream wait is over"};
inline constexpr Constant kCreditHop = {
    "credit_hop", 5.9e-6, "s", "H200 pair: one-word memset until the peer's stream wait is over"};
inline constexpr Constant kKernelStart = {
    "kernel_start", 6.35e-6, "s",
    "H200 pair: hop by a one-thread kernel, 8.3 and 7.2 us, less the 1.4 us of a store and a load"};

// Kernels.
inline constexpr Constant kSumRatePerCta = {
    "sum_rate_per_cta", 1542e9 / 16, "bytes/s",
    "H200 pair: sum of bf16 slices to fp32, coalesced stores, 16 CTAs: 1542 GB/s read and written"};
inline constexpr Constant kSumRateLimit = {"sum_rate_limit", 3852e9, "bytes/s",
                                           "H200 pair: the same sum with 132 CTAs"};
inline constexpr Constant kCopyRatePerCta = {"copy_rate_per_cta", 771e9 / 16, "bytes/s",
                                             "H200 pair: copy kernel of 16 CTAs, bytes copied"};
inline constexpr Constant kPullRatePerCta = {"pull_rate_per_cta", 193e9 / 4, "bytes/s",
                                             "H200 pair: 4 CTAs that read the peer's memory"};
inline constexpr Constant kKernelCtas = {"kernel_ctas", 16, "CTAs",
                                         "tide's kernels launch at most 16 single CTAs"};
inline constexpr Constant kCombineCtas = {"combine_ctas", 4, "CTAs",
                                          "the paper, section 1: 4 CTAs in the last step"};

// What stock FSDP2 adds: layout copies and NCCL's kernels.
inline constexpr Constant kCopyInRate = {
    "copy_in_rate", 218.1e6 / 170e-6, "bytes/s",
    "H200 pair: copy-in of a layer's bf16 shards, 208 MiB in 170 us"};
inline constexpr Constant kCopyOutRate = {
    "copy_out_rate", 436.2e6 / 236e-6, "bytes/s",
    "H200 pair: split_with_sizes_copy of a layer, 416 MiB in 236 us"};
inline constexpr Constant kChunkCatRate = {
    "chunk_cat_rate", 436.2e6 / 680e-6, "bytes/s",
    "H200 pair: chunk_cat of 416 MiB of bf16 gradients to fp32 in 680 us"};
inline constexpr Constant kNcclGatherPerCta = {
    "nccl_gather_per_cta", 1073.7e6 / 2.0e-3 / 24, "bytes/s",
    "H200 pair: ring all-gather of 1 GiB in 2.00 ms by 24 CTAs"};
inline constexpr Constant kNcclReducePerCta = {
    "nccl_reduce_per_cta", 2147.5e6 / 3.764e-3 / 24, "bytes/s",
    "H200 pair: ring reduce-scatter of 2 GiB of fp32 in 3.764 ms by 24 CTAs"};
inline constexpr Constant kNcclCtas = {"nccl_ctas", 16, "CTAs",
                                       "the paper, section 1: NCCL's reduce-scatter on 8 nodes"};
inline constexpr Constant kNcclGatherShare = {
    "nccl_gather_share", 0.51, "of its rate alone",
    "H200 pair: NCCL's all-gather beside back-to-back 8192^3 products"};
inline constexpr Constant kNcclReduceShare = {
    "nccl_reduce_share", 0.86, "of its rate alone",
    "H200 pair: NCCL's fp32 reduce-scatter beside back-to-back 8192^3 products"};
inline constexpr Constant kNcclHop = {
    "nccl_hop", 7e-6, "s", "H200 pair: NCCL all-gather of 1 MiB in 14 us, two steps of its ring"};

// Computing.
inline constexpr Constant kTrafficSlowdown = {
    "traffic_slowdown", 0.092 / 757e9, "per byte/s",
    "H200 pair: 8192^3 products 10.3 and 8.1 % slower beside 757 GB/s of pushes in and out"};
inline constexpr Constant kProductRate = {
    "product_rate", 2 * 6 * 856e6 * 8192 / 114.7e-3, "flop/s",
    "rank 0 of 64: products of two blocks of 856 M parameters, 8,192 tokens, 114.7 ms"};
inline constexpr Constant kAttentionRate = {
    "attention_rate", 8 * 3.5 * 2 * 2048.0 * 2048 * 4096 / 2.9e-3, "flop/s",
    "H200 pair: causal attention of 8 layers, 2,048 tokens, hidden 4096, forward and backward 2.9 "
    "ms"};
inline constexpr Constant kOtherKernels = {
    "other_kernels", (142.5e-3 - 114.7e-3 - 8.89e-3) / (2 * 8192.0 * 8192), "s",
    "rank 0 of 64: per block, token and hidden element, all kernels but products and copies"};
inline constexpr Constant kOptimizer = {
    "optimizer", 8.35e-3 / 1.0035e9, "s",
    "H200 pair: fused AdamW, fp32, per parameter of the shard (8.3 and 8.4 ms)"};
inline constexpr Constant kMeasuredHbm = {"measured_hbm", 4.8e12, "bytes/s",
                                          "data sheet of the H200: rates above scale with it"};
inline constexpr Constant kMeasuredFlops = {"measured_flops", 989.4e12, "flop/s",
                                            "data sheet of the H200, bf16: rates above scale"};

// Between nodes.
inline constexpr Constant kNicRate = {
    "nic_rate", 50e9 * 4096.0 / (4096 + 66), "bytes/s",
    "assumed: 400 Gbit/s, packets of 4096 bytes with 66 of headers"};
inline constexpr Constant kNicLatency = {"nic_latency", 3e-6, "s",
                                         "assumed: RDMA, one way, adapters and two switches"};
inline constexpr Constant kNicMessage = {"nic_message", 1e-6, "s",
                                         "assumed: to post a message or to take one"};
// A put's bytes are told by a message that goes out once the flush is answered.
inline constexpr Constant kArrivalTrips = {"arrival_trips", 3, "one-way trips",
                                           "put, answer to its flush, message (transports/ucx)"};

// All of the above, in that order.
const std::vector<Constant>& cost_constants();

}  // namespace tide
