// What inner backends lack. PREMUL_SUM for those that know sums only (Gloo): the inputs are scaled
// in their own dtype, then summed, which is what NCCL does. CUDA tensors are left to other inner
// backends.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace tide {

// Gloo serves CUDA tensors in part: it knows fewer operations on them, and some end the process.
bool is_gloo_on_gpu(const c10d::Backend& inner, const std::vector<at::Tensor>& tensors);

bool needs_premultiply(const c10d::Backend& inner, const c10d::ReduceOp& op,
                       const std::vector<at::Tensor>& tensors);

// The factor of a PREMUL_SUM as a number.
double premultiply_factor(const c10d::ReduceOp& op);

void premultiply_in_place(const c10d::ReduceOp& op, const std::vector<at::Tensor>& tensors);
std::vector<at::Tensor> premultiplied(const c10d::ReduceOp& op,
                                      const std::vector<at::Tensor>& tensors);

}  // namespace tide
