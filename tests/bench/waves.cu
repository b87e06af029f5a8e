// What communication that stays on SMs does to a product that fills the GPU in one wave: JSON on standard output.
//   waves accumulate.fatbin
//
// The product is 256x8192x8192 in bf16: 128 CTAs in 32 clusters of 4, each CTA with an SM's whole shared memory, as fast
// products are. Beside a long row of them an operation of about 7 ms runs: CTAs that stay for all of it, as clusters or
// single, or the sums that tide launches for a reduce over 8 nodes of 8 ranks with 32 MiB of output, at the times at which
// a network that needs 7 ms would have them launched.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/cuda_lists.h"

namespace {

constexpr int kM = 256, kN = 8192, kK = 8192;
constexpr int kTile = 128, kDepth = 64, kStages = 6, kPitch = kDepth + 8;
constexpr int kStageNumel = 2 * kTile * kPitch;
constexpr int kSharedBytes = 227 * 1024;  // all that a CTA may have
static_assert(kStages * kStageNumel * sizeof(__nv_bfloat16) <= kSharedBytes);
constexpr int kProductThreads = 256;
constexpr int kProductCtas = (kM / kTile) * (kN / kTile);
constexpr int kProducts = 160;  // queued beside one operation: more than it lasts
constexpr double kOperationMs = 7.0;

#define CHECK(expression)                                                                               \
  do {                                                                                                  \
    const cudaError_t error = (expression);                                                             \
    if (error != cudaSuccess) {                                                                         \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #expression, cudaGetErrorString(error)); \
      std::exit(1);                                                                                     \
    }                                                                                                   \
  } while (0)

struct Span {
  unsigned long long begin, end;
};

__device__ unsigned long long now_ns() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

__device__ void load_tile(__nv_bfloat16* to, const __nv_bfloat16* from) {  // kTile rows of kDepth out of rows of kK
  for (int i = threadIdx.x; i < kTile * kDepth / 8; i += kProductThreads) {
    const int row = i / (kDepth / 8), column = i % (kDepth / 8) * 8;
    const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to + row * kPitch + column));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from + size_t{1} * row * kK + column));
  }
}

// c = a * b^T; a is kM x kK, b is kN x kK, c is kM x kN in fp32.
__global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(kProductThreads, 1)
    product(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c, Span* span) {
  using namespace nvcuda;
  extern __shared__ __align__(128) __nv_bfloat16 stages[];
  const unsigned long long begin = now_ns();
  const int m = blockIdx.x % (kM / kTile) * kTile, n = blockIdx.x / (kM / kTile) * kTile;
  const int warp = threadIdx.x / 32, warp_m = warp / 4 * 64, warp_n = warp % 4 * 32;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums[4][2];
  for (auto& row : sums)
    for (auto& sum : row) wmma::fill_fragment(sum, 0.0f);
  const auto load = [&](int step) {
    if (step < kK / kDepth) {
      __nv_bfloat16* stage = stages + step % kStages * kStageNumel;
      load_tile(stage, a + size_t{1} * m * kK + step * kDepth);
      load_tile(stage + kTile * kPitch, b + size_t{1} * n * kK + step * kDepth);
    }
    asm volatile("cp.async.commit_group;");
  };
  for (int step = 0; step < kStages - 1; ++step) load(step);
  for (int step = 0; step < kK / kDepth; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2));
    __syncthreads();
    load(step + kStages - 1);
    const __nv_bfloat16* stage = stages + step % kStages * kStageNumel;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> left[4];
      wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::col_major> right[2];
      for (int i = 0; i < 4; ++i) wmma::load_matrix_sync(left[i], stage + (warp_m + 16 * i) * kPitch + k, kPitch);
      for (int i = 0; i < 2; ++i)
        wmma::load_matrix_sync(right[i], stage + (kTile + warp_n + 16 * i) * kPitch + k, kPitch);
      for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) wmma::mma_sync(sums[i][j], left[i], right[j], sums[i][j]);
    }
  }
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j)
      wmma::store_matrix_sync(c + size_t{1} * (m + warp_m + 16 * i) * kN + n + warp_n + 16 * j, sums[i][j], kN,
                              wmma::mem_row_major);
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicMin(&span->begin, begin);
    atomicMax(&span->end, now_ns());
  }
}

// CTAs that stay: as a communication kernel that waits for the network.
__global__ void stay(unsigned long long nanoseconds, Span* spans) {
  const unsigned long long begin = now_ns();
  while (now_ns() - begin < nanoseconds) __nanosleep(200);
  if (threadIdx.x == 0) spans[blockIdx.x] = {begin, now_ns()};
}

__global__ void stamp(unsigned long long* at) { *at = now_ns(); }

__global__ void fill(__nv_bfloat16* to, size_t numel, unsigned seed) {
  for (size_t i = blockIdx.x * size_t{1} * blockDim.x + threadIdx.x; i < numel; i += size_t{1} * gridDim.x * blockDim.x) {
    unsigned hash = static_cast<unsigned>(i) * 2654435761u + seed;
    hash = (hash ^ hash >> 15) * 2246822519u;
    to[i] = __float2bfloat16(static_cast<float>(hash >> 8) / (1 << 23) - 1.0f);
  }
}

double median(std::vector<double> values) {
  if (values.empty()) return NAN;
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (double value : values) sum += value;
  return sum / values.size();
}

struct Bench {
  __nv_bfloat16 *a, *b;
  float* c;
  Span* product_spans;  // kProducts
  Span* stay_spans;     // 16
  unsigned long long* stamps;
  cudaStream_t computing, operation;  // the operation's has the highest priority, as tide's have
  char *slices, *sums;
  cudaKernel_t add_bf16, add_fp32;
  std::vector<std::pair<cudaEvent_t, cudaEvent_t>> sum_events;

  void queue_products(int count) {
    std::vector<Span> empty(kProducts, Span{~0ull, 0});
    CHECK(cudaMemcpy(product_spans, empty.data(), kProducts * sizeof(Span), cudaMemcpyHostToDevice));
    for (int i = 0; i < count; ++i) {
      product<<<kProductCtas, kProductThreads, kSharedBytes, computing>>>(a, b, c, product_spans + i);
    }
    CHECK(cudaGetLastError());
  }
  // Spans in us of the products that ran inside [begin, end].
  std::vector<double> product_us(unsigned long long begin, unsigned long long end) {
    std::vector<Span> spans(kProducts);
    CHECK(cudaMemcpy(spans.data(), product_spans, kProducts * sizeof(Span), cudaMemcpyDeviceToHost));
    std::vector<double> times;
    for (const Span& span : spans)
      if (span.end > 0 && span.begin >= begin && span.end <= end) times.push_back((span.end - span.begin) / 1e3);
    return times;
  }
};

constexpr int64_t kOutputNumel = 8 << 20;  // 32 MiB of fp32 a rank, 64 ranks
constexpr int kNodes = 8, kRanks = 8;

// One launch of tide's sum over blocks of `numel` elements each.
void launch_sum(Bench& bench, cudaKernel_t kernel, tide::DType slice, int blocks, int64_t numel, unsigned ctas) {
  using namespace tide;
  cuda::ListBuilder list;
  for (int block = 0; block < blocks; ++block) {
    AccumulateBlock sum;
    for (int r = 0; r < kRanks; ++r)
      sum.slices.push_back(bench.slices + (int64_t{block} * kRanks + r) * numel * dtype_bytes(slice));
    sum.output = bench.sums + int64_t{block} * numel * 4;
    sum.numel = numel;
    sum.slice_dtype = slice;
    sum.output_dtype = DType::kFloat32;
    if (!list.append(sum, {})) std::exit(1);
  }
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  void* parameters[] = {list.parameters()};
  CHECK(cudaEventRecord(begin, bench.operation));
  CHECK(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(list.ctas(ctas)), dim3(cuda::kThreads), parameters, 0,
                         bench.operation));
  CHECK(cudaEventRecord(end, bench.operation));
  bench.sum_events.emplace_back(begin, end);
}

// The kernels of one reduce: level 1 adds this rank's segment for every node, in `firsts` launches of 16 CTAs; the last
// step adds the nodes' partial sums, in `lasts` launches of 4 CTAs. The first launches follow the gradients, the last ones
// are spread over what the network takes.
void run_reduce(Bench& bench, int firsts, int lasts) {
  const auto start = std::chrono::steady_clock::now();
  const auto at = [start](double ms) {
    while (std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() < ms) {
    }
  };
  for (int i = 0; i < firsts; ++i) {
    at(1.5 * i / firsts);
    launch_sum(bench, bench.add_bf16, tide::DType::kBFloat16, kNodes, kOutputNumel / firsts, 16);
  }
  for (int i = 0; i < lasts; ++i) {
    at(2.0 + (kOperationMs - 2.0) * (i + 1) / lasts - 0.3);
    launch_sum(bench, bench.add_fp32, tide::DType::kFloat32, 1, kOutputNumel / lasts, 4);
  }
}

struct Variant {
  std::string name;
  int staying_ctas = 0, cluster = 1;  // CTAs that stay
  int firsts = 0, lasts = 0;          // or tide's launches
};

struct Measured {
  std::vector<double> products_us, operation_ms, lifetimes_ms;
};

// One operation, alone or beside products, whose spans inside the operation's are kept.
void run(Bench& bench, const Variant& variant, bool beside, Measured* measured) {
  CHECK(cudaDeviceSynchronize());
  bench.sum_events.clear();
  if (beside) bench.queue_products(kProducts);
  stamp<<<1, 1, 0, bench.operation>>>(bench.stamps);
  if (variant.staying_ctas > 0) {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(variant.cluster), 1, 1};
    attributes[1].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
    attributes[1].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicySpread;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(variant.staying_ctas);
    config.blockDim = dim3(544);
    config.stream = bench.operation;
    config.attrs = attributes;
    config.numAttrs = variant.cluster > 1 ? 2 : 0;
    CHECK(cudaLaunchKernelEx(&config, stay, static_cast<unsigned long long>(kOperationMs * 1e6), bench.stay_spans));
  } else if (variant.firsts > 0) {
    run_reduce(bench, variant.firsts, variant.lasts);
  }
  stamp<<<1, 1, 0, bench.operation>>>(bench.stamps + 1);
  CHECK(cudaDeviceSynchronize());
  unsigned long long stamps[2];
  CHECK(cudaMemcpy(stamps, bench.stamps, sizeof(stamps), cudaMemcpyDeviceToHost));
  measured->operation_ms.push_back((stamps[1] - stamps[0]) / 1e6);
  if (variant.staying_ctas > 0) {
    std::vector<Span> spans(variant.staying_ctas);
    CHECK(cudaMemcpy(spans.data(), bench.stay_spans, spans.size() * sizeof(Span), cudaMemcpyDeviceToHost));
    stamps[0] = spans[0].begin;  // products before the CTAs came do not count
    for (const Span& span : spans) {
      measured->lifetimes_ms.push_back((span.end - span.begin) / 1e6);
      stamps[0] = std::max(stamps[0], span.begin);
    }
  }
  for (const auto& [begin, end] : bench.sum_events) {
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    measured->lifetimes_ms.push_back(ms);
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
  }
  if (beside) {
    const bool nothing = variant.staying_ctas == 0 && variant.firsts == 0;
    for (double us : bench.product_us(nothing ? 0 : stamps[0], nothing ? ~0ull : stamps[1]))
      measured->products_us.push_back(us);
  }
}

// The product against the host's, at some places.
double worst_error(Bench& bench) {
  bench.queue_products(1);
  CHECK(cudaDeviceSynchronize());
  std::vector<__nv_bfloat16> left(kK), right(kK);
  double worst = 0;
  for (int i = 0; i < 40; ++i) {
    const int m = i * 53 % kM, n = i * 7919 % kN;
    CHECK(cudaMemcpy(left.data(), bench.a + size_t{1} * m * kK, kK * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(right.data(), bench.b + size_t{1} * n * kK, kK * 2, cudaMemcpyDeviceToHost));
    double wanted = 0;
    for (int k = 0; k < kK; ++k)
      wanted += static_cast<double>(__bfloat162float(left[k])) * static_cast<double>(__bfloat162float(right[k]));
    float got = 0;
    CHECK(cudaMemcpy(&got, bench.c + size_t{1} * m * kN + n, 4, cudaMemcpyDeviceToHost));
    worst = std::max(worst, std::abs(got - wanted));
  }
  return worst;
}

void prepare(Bench& bench, const char* image) {
  CHECK(cudaFuncSetAttribute(product, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  int least = 0, greatest = 0;
  CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  CHECK(cudaStreamCreateWithPriority(&bench.computing, cudaStreamNonBlocking, least));
  CHECK(cudaStreamCreateWithPriority(&bench.operation, cudaStreamNonBlocking, greatest));
  CHECK(cudaMalloc(&bench.a, sizeof(__nv_bfloat16) * kM * kK));
  CHECK(cudaMalloc(&bench.b, sizeof(__nv_bfloat16) * kN * kK));
  CHECK(cudaMalloc(&bench.c, sizeof(float) * kM * kN));
  CHECK(cudaMalloc(&bench.product_spans, sizeof(Span) * kProducts));
  CHECK(cudaMalloc(&bench.stay_spans, sizeof(Span) * 64));
  CHECK(cudaMalloc(&bench.stamps, 16));
  CHECK(cudaMalloc(&bench.slices, kOutputNumel * kNodes * kRanks * 2));
  CHECK(cudaMalloc(&bench.sums, kOutputNumel * kNodes * 4));
  fill<<<1024, 256>>>(bench.a, size_t{1} * kM * kK, 1);
  fill<<<1024, 256>>>(bench.b, size_t{1} * kN * kK, 2);
  fill<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(bench.slices), size_t{1} * kOutputNumel * kNodes * kRanks, 3);
  CHECK(cudaDeviceSynchronize());
  cudaLibrary_t library;
  CHECK(cudaLibraryLoadFromFile(&library, image, nullptr, nullptr, 0, nullptr, nullptr, 0));
  CHECK(cudaLibraryGetKernel(&bench.add_bf16, library, "accumulate_bf16"));
  CHECK(cudaLibraryGetKernel(&bench.add_fp32, library, "accumulate_fp32"));
}

int places() {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {4, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kProductCtas);
  config.blockDim = dim3(kProductThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  CHECK(cudaOccupancyMaxActiveClusters(&clusters, product, &config));
  return clusters;
}

}  // namespace

int main(int arguments, char** argument) {
  if (arguments != 2) {
    std::fprintf(stderr, "usage: waves accumulate.fatbin\n");
    return 2;
  }
  Bench bench;
  prepare(bench, argument[1]);
  const Variant variants[] = {
      {"nothing"},
      {"a: 4 clusters of 4 CTAs stay", 16, 4},
      {"b: 16 single CTAs stay", 16, 1},
      {"c: 4 single CTAs stay", 4, 1},
      {"d: tide's sums, 2 + 2 launches", 0, 1, 2, 2},
      {"d: tide's sums, 4 + 4 launches", 0, 1, 4, 4},
      {"d: tide's sums, 1 + 1 launches", 0, 1, 1, 1},
  };
  std::printf("{\"places\": %d, \"clusters_of_a_product\": %d, \"worst_error\": %.3g, \"operation_ms\": %.1f, \"rows\": [",
              places(), kProductCtas / 4, worst_error(bench), kOperationMs);
  double alone_us = 0;
  bool first = true;
  for (const Variant& variant : variants) {
    Measured alone, beside;
    for (int round = 0; round < 8; ++round) {
      Measured warm;
      const bool warming = round == 0;
      if (variant.staying_ctas + variant.firsts > 0) run(bench, variant, false, warming ? &warm : &alone);
      run(bench, variant, true, warming ? &warm : &beside);
    }
    const double product_us = mean(beside.products_us);
    if (first) alone_us = product_us;
    std::printf("%s\n {\"beside\": \"%s\", \"products\": %zu, \"product_mean_us\": %.2f, \"product_median_us\": %.2f, "
                "\"product_slower\": %.4f",
                first ? "" : ",", variant.name.c_str(), beside.products_us.size(), product_us, median(beside.products_us),
                product_us / alone_us - 1);
    if (!alone.operation_ms.empty()) {
      std::printf(", \"operation_alone_ms\": %.3f, \"operation_beside_ms\": %.3f, \"cta_alone_ms\": %.3f, "
                  "\"cta_beside_at_most_ms\": %.3f",
                  median(alone.operation_ms), median(beside.operation_ms),
                  *std::max_element(alone.lifetimes_ms.begin(), alone.lifetimes_ms.end()),
                  *std::max_element(beside.lifetimes_ms.begin(), beside.lifetimes_ms.end()));
    }
    std::printf("}");
    first = false;
  }
  std::printf("]}\n");
  return 0;
}
