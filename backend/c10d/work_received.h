// A receive into device memory by way of the host, for an inner backend that receives into host
// memory only. The values reach the device tensors in wait(), on the waiting thread's current
// stream; wait() returns when they are there.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace tide {

class WorkReceived : public c10d::Work {
 public:
  // `work` receives into `host`, tensors shaped like `device`.
  WorkReceived(int rank, c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> host,
               std::vector<at::Tensor> device)
      : c10d::Work(rank, c10d::OpType::RECV),
        work_(std::move(work)),
        host_(std::move(host)),
        device_(std::move(device)) {}

  bool isCompleted() override;
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return device_; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override { work_->abort(); }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
  std::mutex mutex_;              // guards what follows
  std::vector<at::Tensor> host_;  // empty once the values were copied
  const std::vector<at::Tensor> device_;
};

}  // namespace tide
