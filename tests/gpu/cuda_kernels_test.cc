// The CUDA kernels against their processor twins, bit for bit, over random bits (NaNs, infinities,
// denormals): every type pair, alignment, tail, slice count and mode; bytes around the outputs must
// stay.
#include <random>

#include "kernels/accumulate.h"
#include "kernels/cast.h"
#include "kernels/copy.h"
#include "tests/gpu/gpu_fixture.h"

namespace tide::cuda {
namespace {

constexpr DType kFloats[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
constexpr DType kCasts[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat64};
constexpr int64_t kGuard = 64;

// Host bytes with a twin on the device. Random bits; one element in four is one that rounding finds
// hard.
class Twin {
 public:
  Twin(std::mt19937_64& random, int64_t bytes, DType dtype = DType::kBytes)
      : host_(static_cast<size_t>(bytes)) {
    for (int64_t i = 0; i < bytes; ++i)
      host_[static_cast<size_t>(i)] = static_cast<std::byte>(random());
    static constexpr uint32_t kHard[] = {0x7f800000, 0xff800000, 0x7fc00001, 0x7f800001,
                                         0xffffffff, 0x80000000, 1,          0x007fffff,
                                         0x7f7fffff, 0x3f808000, 0x3f818000, 0x477ff000,
                                         0x33000000, 0x33000001, 0x387fe000, 0};
    const int64_t size = dtype_bytes(dtype);
    for (int64_t i = 0; size > 1 && i + size <= bytes; i += 4 * size) {
      const uint64_t hard = kHard[random() % std::size(kHard)];
      const uint64_t bits = size == 2 ? hard >> 16 : size == 8 ? hard << 32 : hard;
      std::memcpy(host_.data() + i, &bits, static_cast<size_t>(size));
    }
    device_ = std::make_unique<DeviceBytes>(host_.size());
    device_->write(host_.data());
  }
  std::byte* host() { return host_.data(); }
  char* device() { return device_->get(); }
  // Where the device's bytes differ from the host's first; -1 nowhere.
  int64_t first_difference() {
    const std::vector<std::byte> got = device_->read();
    for (size_t i = 0; i < got.size(); ++i) {
      if (got[i] != host_[i]) return static_cast<int64_t>(i);
    }
    return -1;
  }

 private:
  std::vector<std::byte> host_;
  std::unique_ptr<DeviceBytes> device_;
};

class KernelsTest : public GpuTest {
 protected:
  struct Sum {
    DType slice, output;
    int slices = 1;
    int64_t numel = 0, pad = 0;
    AccumulateOptions options;
    int64_t slice_shift = 0, output_shift = 0;
    bool shift_one_slice_only = false;
  };

  void check_sums(const std::vector<Sum>& sums, unsigned ctas = kCtas) {
    struct Made {
      std::vector<std::unique_ptr<Twin>> slices;
      std::unique_ptr<Twin> output;
    };
    ListBuilder list;
    std::vector<Made> made;
    for (const Sum& sum : sums) {
      Made m;
      AccumulateBlock on_host, on_device;
      on_host.numel = on_device.numel = sum.numel;
      on_host.pad_numel = on_device.pad_numel = sum.pad;
      on_host.slice_dtype = on_device.slice_dtype = sum.slice;
      on_host.output_dtype = on_device.output_dtype = sum.output;
      for (int s = 0; s < sum.slices; ++s) {
        const int64_t shift = sum.shift_one_slice_only && s != sum.slices / 2 ? 0 : sum.slice_shift;
        m.slices.push_back(
            std::make_unique<Twin>(random_, sum.numel * dtype_bytes(sum.slice) + shift, sum.slice));
        on_host.slices.push_back(m.slices.back()->host() + shift);
        on_device.slices.push_back(m.slices.back()->device() + shift);
      }
      const int64_t start = kGuard + sum.output_shift;
      m.output = std::make_unique<Twin>(
          random_, start + (sum.numel + sum.pad) * dtype_bytes(sum.output) + kGuard, sum.output);
      on_host.output = m.output->host() + start;
      on_device.output = m.output->device() + start;
      if (!list.append(on_device, sum.options)) break;
      ASSERT_TRUE(accumulate_block(on_host, sum.options).is_ok());
      made.push_back(std::move(m));
    }
    const Status launched = kernels_->launch(stream_, accumulate_kernel(sums[0].slice), list, ctas);
    ASSERT_TRUE(launched.is_ok()) << launched.to_string();
    synchronize();
    for (size_t i = 0; i < made.size(); ++i) {
      const Sum& sum = sums[i];
      const int64_t at = made[i].output->first_difference();
      ASSERT_EQ(at, -1) << dtype_name(sum.slice) << " to " << dtype_name(sum.output) << ", "
                        << sum.slices << " slices, block " << i << " of " << sums.size()
                        << ", element "
                        << (at - kGuard - sum.output_shift) / dtype_bytes(sum.output) << " of "
                        << sum.numel << "+" << sum.pad << ", shifts " << sum.slice_shift << " "
                        << sum.output_shift;
    }
  }

  std::mt19937_64 random_{7};
};

TEST_F(KernelsTest, SumsOfEveryTypePairModeAndSliceCount) {
  for (DType slice : kFloats) {
    for (DType output : kFloats) {
      for (int slices : {1, 2, 3, 4, 5, 7, 8, 9, 16, 17}) {
        for (bool add : {false, true}) {
          check_sums({{slice,
                       output,
                       slices,
                       20011,
                       37,
                       {ReduceOp::kSum, slices % 2 ? 1.0 / 3 : 1.0, add}}});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(KernelsTest, SumsAtEveryTailAndAlignment) {
  for (DType slice : kFloats) {
    for (DType output : kFloats) {
      std::vector<Sum> sums;
      for (int64_t numel = 0; numel <= 40; ++numel) {
        for (bool one : {false, true}) {
          Sum sum{
              slice, output, 3, numel + (numel % 3) * 511, numel % 5, {ReduceOp::kSum, 0.5, false}};
          sum.slice_shift = static_cast<int64_t>(random_() % 32);
          sum.output_shift = static_cast<int64_t>(random_() % 32);
          if (numel % 4 != 0) {  // element-aligned, as tensors are
            sum.slice_shift -= sum.slice_shift % dtype_bytes(slice);
            sum.output_shift -= sum.output_shift % dtype_bytes(output);
          }
          sum.shift_one_slice_only = one;
          sums.push_back(sum);
        }
      }
      check_sums(sums);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(KernelsTest, ManyBlocksOfAllSizesInOneLaunch) {
  for (unsigned ctas : {1u, 4u, 16u}) {
    std::vector<Sum> sums;
    for (int i = 0; i < 200; ++i) {
      const int64_t numel =
          static_cast<int64_t>(random_() % 3 == 0 ? random_() % 70000 : random_() % 300);
      Sum sum{DType::kBFloat16,
              DType::kFloat32,
              8,
              numel,
              static_cast<int64_t>(random_() % 20),
              {ReduceOp::kSum, 0.125, false}};
      sum.slice_shift = i % 7 == 0 ? 2 * static_cast<int64_t>(random_() % 8) : 0;
      sum.shift_one_slice_only = i % 2 == 0;
      sums.push_back(sum);
    }
    check_sums(sums, ctas);
    if (HasFatalFailure()) return;
  }
}

TEST_F(KernelsTest, LargeSumAndLargePad) {
  check_sums(
      {{DType::kBFloat16, DType::kFloat32, 8, (3 << 20) + 5, 0, {ReduceOp::kSum, 0.125, true}}});
  check_sums({{DType::kBFloat16, DType::kBFloat16, 2, 100, 1 << 20, {ReduceOp::kSum, 0.5, false}}});
}

TEST_F(KernelsTest, PoisonMakesEverySumNaN) {
  Twin slice(random_, 4 * 1000, DType::kFloat32);
  Twin output(random_, 4 * 1000, DType::kFloat32);
  DeviceBytes word(4);
  AccumulateBlock block;
  block.slices = {slice.device()};
  block.output = output.device();
  block.numel = 990;
  block.pad_numel = 10;
  for (const uint32_t poison : {0u, 1u}) {
    word.write(&poison);
    ListBuilder list;
    ASSERT_TRUE(list.append(block, {}));
    list.set_poison(reinterpret_cast<const uint32_t*>(word.get()));
    ASSERT_TRUE(kernels_->launch(stream_, accumulate_kernel(DType::kFloat32), list).is_ok());
    synchronize();
    AccumulateBlock twin = block;
    twin.slices = {slice.host()};
    twin.output = output.host();
    ASSERT_TRUE(accumulate_block(twin, {}).is_ok());
    if (poison != 0) {
      const uint32_t nan = 0x7fc00000u;
      for (int i = 0; i < 1000; ++i) std::memcpy(output.host() + 4 * i, &nan, 4);
    }
    EXPECT_EQ(output.first_difference(), -1) << "poison " << poison;
  }
}

TEST_F(KernelsTest, CastsOfEveryTypePairTailAndAlignment) {
  for (DType from : kCasts) {
    for (DType to : kCasts) {
      if (from == to) continue;
      ListBuilder list;
      std::vector<std::pair<std::unique_ptr<Twin>, std::unique_ptr<Twin>>> made;
      for (int64_t numel : {1, 2, 3, 7, 8, 15, 64, 100, 5000, 40001}) {
        for (int64_t shift : {0, 1, 2, 4, 8, 12, 16}) {
          auto source = std::make_unique<Twin>(random_, numel * dtype_bytes(from) + shift, from);
          auto target =
              std::make_unique<Twin>(random_, numel * dtype_bytes(to) + shift / 2 + 2 * kGuard);
          CastBlock block{target->device() + kGuard + shift / 2, source->device() + shift, numel,
                          to, from};
          ASSERT_TRUE(list.append(block));
          CastBlock twin{target->host() + kGuard + shift / 2, source->host() + shift, numel, to,
                         from};
          ASSERT_TRUE(cast_block(twin).is_ok());
          made.emplace_back(std::move(source), std::move(target));
        }
      }
      const Status launched = kernels_->launch(stream_, cast_kernel(from, to), list);
      ASSERT_TRUE(launched.is_ok()) << launched.to_string();
      synchronize();
      for (size_t i = 0; i < made.size(); ++i) {
        ASSERT_EQ(made[i].second->first_difference(), -1)
            << dtype_name(from) << " to " << dtype_name(to) << ", block " << i;
      }
    }
  }
}

TEST_F(KernelsTest, PacksRectanglesOfEveryShape) {
  for (int round = 0; round < 4; ++round) {
    ListBuilder list;
    std::vector<std::pair<std::unique_ptr<Twin>, std::unique_ptr<Twin>>> made;
    for (int i = 0; i < 150; ++i) {
      const int64_t step = round == 0 ? 16 : round == 1 ? 4 : 1;
      const int64_t rows = 1 + static_cast<int64_t>(random_() % (i % 5 == 0 ? 60 : 3));
      const int64_t row_bytes =
          step * (1 + static_cast<int64_t>(random_() % (i % 9 == 0 ? 9000 : 40)));
      const int64_t to_pitch = row_bytes + step * static_cast<int64_t>(random_() % 5);
      const int64_t from_pitch = row_bytes + step * static_cast<int64_t>(random_() % 5);
      const int64_t to_shift = step * static_cast<int64_t>(random_() % 16);
      const int64_t from_shift = step * static_cast<int64_t>(random_() % 16);
      auto source = std::make_unique<Twin>(random_, rows * from_pitch + from_shift);
      auto target = std::make_unique<Twin>(random_, rows * to_pitch + to_shift + kGuard);
      ASSERT_TRUE(list.append(CopyBlock{target->device() + to_shift, source->device() + from_shift,
                                        rows, row_bytes, to_pitch, from_pitch}));
      copy_block({target->host() + to_shift, source->host() + from_shift, rows, row_bytes, to_pitch,
                  from_pitch});
      made.emplace_back(std::move(source), std::move(target));
    }
    const Status launched = kernels_->launch(stream_, pack_kernel(), list);
    ASSERT_TRUE(launched.is_ok()) << launched.to_string();
    synchronize();
    for (size_t i = 0; i < made.size(); ++i) {
      ASSERT_EQ(made[i].second->first_difference(), -1) << "round " << round << ", rectangle " << i;
    }
  }
}

}  // namespace
}  // namespace tide::cuda
