#include "backend/c10d/tensors.h"

#include <c10/core/ScalarType.h>

namespace tide {

DType dtype_of(at::ScalarType type, bool* known) {
  if (known != nullptr) *known = true;
  switch (type) {
    case at::kBool:
      return DType::kBool;
    case at::kByte:
      return DType::kUInt8;
    case at::kChar:
      return DType::kInt8;
    case at::kUInt16:
      return DType::kUInt16;
    case at::kShort:
      return DType::kInt16;
    case at::kUInt32:
      return DType::kUInt32;
    case at::kInt:
      return DType::kInt32;
    case at::kUInt64:
      return DType::kUInt64;
    case at::kLong:
      return DType::kInt64;
    case at::kFloat8_e4m3fn:
      return DType::kFloat8E4M3;
    case at::kFloat8_e5m2:
      return DType::kFloat8E5M2;
    case at::kFloat8_e4m3fnuz:
      return DType::kFloat8E4M3Fnuz;
    case at::kFloat8_e5m2fnuz:
      return DType::kFloat8E5M2Fnuz;
    case at::kFloat8_e8m0fnu:
      return DType::kFloat8E8M0;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kComplexHalf:
      return DType::kComplex32;
    case at::kComplexFloat:
      return DType::kComplex64;
    case at::kComplexDouble:
      return DType::kComplex128;
    default:
      if (known != nullptr) *known = false;
      return DType::kBytes;
  }
}

TensorView view_of(const at::Tensor& tensor, bool written) {
  TensorView view;
  view.numel = tensor.numel();
  view.dtype = dtype_of(tensor.scalar_type(), &view.known_dtype);
  view.type_name = c10::toString(tensor.scalar_type());
  if (tensor.layout() != at::kStrided || tensor.is_conj() || tensor.is_neg()) {
    view.contiguous = false;
    return view;
  }
  view.contiguous = tensor.is_contiguous();
  if (!tensor.device().is_cpu()) view.device = tensor.device().str();
  if (view.numel > 0 && (tensor.device().is_cpu() || tensor.device().is_cuda())) {
    view.data = written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
  }
  return view;
}

std::vector<TensorView> views_of(const std::vector<at::Tensor>& tensors, bool written) {
  std::vector<TensorView> views;
  views.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) views.push_back(view_of(tensor, written));
  return views;
}

}  // namespace tide
