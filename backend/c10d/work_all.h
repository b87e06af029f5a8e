// Several works as one: what a coalescing region ends with. Complete when all are; the first error
// is its error.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace tide {

class WorkAll : public c10d::Work {
 public:
  WorkAll(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : c10d::Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void blockCurrentStream() override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace tide
