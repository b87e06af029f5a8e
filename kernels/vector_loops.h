// The loops of sum and cast over a level's lanes. Included once by each vector source, after its
// target pragma, so that every function here is compiled for that level; `Lanes` is a type of that
// source alone, so no copy is shared with another level. Nothing but the elements of whole steps is
// done here: heads and tails go to the baseline functions.
//
// Lanes offers: Vector, kLanes, load<DType>(const char*), store<DType, stream>(char*, Vector), add,
// multiply, set, canonical (NaN -> the quiet NaN), fence.

namespace tide {
namespace {

constexpr int kUnroll = 4;

constexpr int64_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

template <class Lanes, DType kSlice, DType kOutput, bool kStream>
int64_t sum_steps(const SumCall& call, int64_t i) {
  using Vector = typename Lanes::Vector;
  constexpr int64_t kStep = kUnroll * Lanes::kLanes;
  constexpr int64_t kSliceBytes = element_bytes(kSlice);
  constexpr int64_t kOutputBytes = element_bytes(kOutput);
  const Vector scale = Lanes::set(call.scale);
  const int count = call.count;
  for (; i + kStep <= call.end; i += kStep) {
    Vector sum[kUnroll];
    const char* from = static_cast<const char*>(call.slices[0]) + i * kSliceBytes;
    for (int u = 0; u < kUnroll; ++u) {
      sum[u] = Lanes::template load<kSlice>(from + u * Lanes::kLanes * kSliceBytes);
    }
    for (int slice = 1; slice < count; ++slice) {
      from = static_cast<const char*>(call.slices[slice]) + i * kSliceBytes;
      for (int u = 0; u < kUnroll; ++u) {
        sum[u] = Lanes::add(sum[u],
                            Lanes::template load<kSlice>(from + u * Lanes::kLanes * kSliceBytes));
      }
    }
    char* to = static_cast<char*>(call.output) + i * kOutputBytes;
    for (int u = 0; u < kUnroll; ++u) {
      char* lane_to = to + u * Lanes::kLanes * kOutputBytes;
      sum[u] = Lanes::multiply(sum[u], scale);
      if (call.add) sum[u] = Lanes::add(Lanes::template load<kOutput>(lane_to), sum[u]);
      Lanes::template store<kOutput, kStream>(lane_to, Lanes::canonical(sum[u]));
    }
  }
  return i;
}

template <class Lanes, DType kSlice, DType kOutput>
void sum_run(const SumCall& call) {
  SumCall part = call;
  if (call.stream) {  // up to the first whole cache line of the output
    const uint64_t address = reinterpret_cast<uint64_t>(call.output) +
                             static_cast<uint64_t>(call.begin * element_bytes(kOutput));
    const int64_t head = static_cast<int64_t>(-address & 63u) / element_bytes(kOutput);
    part.end = call.begin + head < call.end ? call.begin + head : call.end;
    sum_baseline(kSlice, kOutput)(part);
    part.begin = sum_steps<Lanes, kSlice, kOutput, true>(call, part.end);
    Lanes::fence();
  } else {
    part.begin = sum_steps<Lanes, kSlice, kOutput, false>(call, call.begin);
  }
  part.end = call.end;
  sum_baseline(kSlice, kOutput)(part);
}

template <class Lanes, DType kFrom, DType kTo>
void cast_run(const void* from, void* to, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + Lanes::kLanes <= end; i += Lanes::kLanes) {
    Lanes::template store<kTo, false>(
        static_cast<char*>(to) + i * element_bytes(kTo),
        Lanes::template load<kFrom>(static_cast<const char*>(from) + i * element_bytes(kFrom)));
  }
  cast_baseline(kFrom, kTo)(from, to, i, end);
}

template <class Lanes, DType kSlice>
SumFunction choose_sum(DType output) {
  switch (output) {
    case DType::kBFloat16:
      return sum_run<Lanes, kSlice, DType::kBFloat16>;
    case DType::kFloat16:
      return sum_run<Lanes, kSlice, DType::kFloat16>;
    case DType::kFloat32:
      return sum_run<Lanes, kSlice, DType::kFloat32>;
    default:
      return nullptr;
  }
}

template <class Lanes, DType kFrom>
CastFunction choose_cast(DType to) {
  switch (to) {
    case DType::kBFloat16:
      return cast_run<Lanes, kFrom, DType::kBFloat16>;
    case DType::kFloat16:
      return cast_run<Lanes, kFrom, DType::kFloat16>;
    case DType::kFloat32:
      return cast_run<Lanes, kFrom, DType::kFloat32>;
    default:
      return nullptr;
  }
}

template <class Lanes>
SumFunction choose_sum(DType slice, DType output) {
  switch (slice) {
    case DType::kBFloat16:
      return choose_sum<Lanes, DType::kBFloat16>(output);
    case DType::kFloat16:
      return choose_sum<Lanes, DType::kFloat16>(output);
    case DType::kFloat32:
      return choose_sum<Lanes, DType::kFloat32>(output);
    default:
      return nullptr;
  }
}

template <class Lanes>
CastFunction choose_cast(DType from, DType to) {
  switch (from) {
    case DType::kBFloat16:
      return choose_cast<Lanes, DType::kBFloat16>(to);
    case DType::kFloat16:
      return choose_cast<Lanes, DType::kFloat16>(to);
    case DType::kFloat32:
      return choose_cast<Lanes, DType::kFloat32>(to);
    default:
      return nullptr;
  }
}

}  // namespace
}  // namespace tide
