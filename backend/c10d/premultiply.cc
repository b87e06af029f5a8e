#include "backend/c10d/premultiply.h"

#include <ATen/ATen.h>

namespace tide {

bool is_gloo_on_gpu(const c10d::Backend& inner, const std::vector<at::Tensor>& tensors) {
  return !tensors.empty() && !tensors.front().device().is_cpu() && inner.getBackendName() == "gloo";
}

bool needs_premultiply(const c10d::Backend& inner, const c10d::ReduceOp& op,
                       const std::vector<at::Tensor>& tensors) {
  return op.op_ == c10d::ReduceOp::PREMUL_SUM &&
         (tensors.empty() || tensors.front().device().is_cpu() || is_gloo_on_gpu(inner, tensors));
}

double premultiply_factor(const c10d::ReduceOp& op) {
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(supplement != nullptr, "PREMUL_SUM without a factor");
  if (supplement->tensor_factor.defined()) return supplement->tensor_factor.item<double>();
  return supplement->double_factor;
}

void premultiply_in_place(const c10d::ReduceOp& op, const std::vector<at::Tensor>& tensors) {
  double factor = premultiply_factor(op);
  for (at::Tensor tensor : tensors) {
    at::NoGradGuard no_grad;
    tensor.mul_(factor);
  }
}

std::vector<at::Tensor> premultiplied(const c10d::ReduceOp& op,
                                      const std::vector<at::Tensor>& tensors) {
  double factor = premultiply_factor(op);
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> scaled;
  scaled.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors)
    scaled.push_back(tensor.mul(factor).to(tensor.scalar_type()));
  return scaled;
}

}  // namespace tide
