#include "backend/base/dtype.h"

namespace tide {
namespace {

struct Facts {
  const char* name;
  int bytes;
  bool summable;
};

Facts facts(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return {"bool", 1, false};
    case DType::kUInt8:
      return {"uint8", 1, true};
    case DType::kInt8:
      return {"int8", 1, true};
    case DType::kUInt16:
      return {"uint16", 2, false};
    case DType::kInt16:
      return {"int16", 2, true};
    case DType::kUInt32:
      return {"uint32", 4, false};
    case DType::kInt32:
      return {"int32", 4, true};
    case DType::kUInt64:
      return {"uint64", 8, false};
    case DType::kInt64:
      return {"int64", 8, true};
    case DType::kFloat8E4M3:
      return {"float8_e4m3", 1, false};
    case DType::kFloat8E5M2:
      return {"float8_e5m2", 1, false};
    case DType::kFloat8E4M3Fnuz:
      return {"float8_e4m3fnuz", 1, false};
    case DType::kFloat8E5M2Fnuz:
      return {"float8_e5m2fnuz", 1, false};
    case DType::kFloat8E8M0:
      return {"float8_e8m0", 1, false};
    case DType::kFloat16:
      return {"fp16", 2, true};
    case DType::kBFloat16:
      return {"bf16", 2, true};
    case DType::kFloat32:
      return {"fp32", 4, true};
    case DType::kFloat64:
      return {"fp64", 8, true};
    case DType::kComplex32:
      return {"complex32", 4, false};
    case DType::kComplex64:
      return {"complex64", 8, false};
    case DType::kComplex128:
      return {"complex128", 16, false};
    case DType::kBytes:
      return {"bytes", 1, false};
  }
  return {"unknown", 1, false};
}

}  // namespace

int64_t dtype_bytes(DType dtype) { return facts(dtype).bytes; }
const char* dtype_name(DType dtype) { return facts(dtype).name; }
bool is_summable(DType dtype) { return facts(dtype).summable; }

}  // namespace tide
