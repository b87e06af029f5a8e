// torch's tensors as the torch-free parts see them.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "backend/c10d/tensor_view.h"

namespace tide {

// kBytes, and known = false, for types that tide has no name for.
DType dtype_of(at::ScalarType type, bool* known = nullptr);

// `written`: its memory is about to be written, so a lazily copied tensor gets memory of its own
// now.
TensorView view_of(const at::Tensor& tensor, bool written);
std::vector<TensorView> views_of(const std::vector<at::Tensor>& tensors, bool written);

}  // namespace tide
