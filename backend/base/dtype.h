// The element types tide moves and adds. Gather moves bytes, so every type is allowed there; reduce
// adds, so it takes the types for which is_summable() holds (16- and 32-bit floats are summed in
// fp32, fp64 in fp64, integers exactly).
#pragma once

#include <cstdint>

namespace tide {

enum class DType : uint8_t {
  kBool,
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kFloat8E4M3,
  kFloat8E5M2,
  kFloat8E4M3Fnuz,
  kFloat8E5M2Fnuz,
  kFloat8E8M0,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kComplex32,
  kComplex64,
  kComplex128,
  kBytes,  // one byte of unknown meaning: may be gathered, never summed
};

// Bytes of one element.
int64_t dtype_bytes(DType dtype);

// "bf16", "fp32", "int64", ...: as messages print it.
const char* dtype_name(DType dtype);

// Whether kernels/accumulate.h can add elements of this type.
bool is_summable(DType dtype);

}  // namespace tide
