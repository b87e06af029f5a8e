// The fabric of GPUs of one host: copy engines, few short kernels, stream waits. Enqueuing: every
// call returns when its work is on the queue's stream; one thread issues all steps, in an order in
// which they would also finish.
//
// Built on a host fabric, which introduces the ranks, hears of their ends and carries descriptors
// and votes; host() gives it to the engine for what the processor reads (records of calls). Several
// ranks may share a GPU.
//
// Differences to a blocking fabric, for the engine:
//   - wait() returns at once; what its guard refers to must live until the queue has passed the
//   wait or close() has
//     returned. An error of a wait (deadline, check, the group's failure) comes to
//     on_wait_failure's listener, from a thread of the fabric; all queues are then released by
//     poison, sums write NaN, and later calls are refused.
//   - mark() tells when the host may know that a queue got there; stream() and wait_for_stream()
//   order user streams.
// No call synchronises host and device but create_window and close.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "kernels/cuda_images.h"
#include "transports/cuda/driver_api.h"
#include "transports/fabric.h"
#include "transports/host/host_fabric.h"

namespace tide {

struct CudaFabricOptions {
  HostFabricOptions host;
  int device = 0;  // ordinal in this process
  int queues = 8;  // queue numbers are below
  Result<cuda::DriverApi> api = Status(ErrorKind::kInternal, "no driver given");
  Result<std::vector<cuda::KernelImage>> images = Status(ErrorKind::kInternal, "no kernels given");
};

class CudaFabric : public Fabric {
 public:
  virtual Fabric& host() = 0;

  // From any thread of the fabric, at most once. Set before the first wait.
  virtual void on_wait_failure(std::function<void(const Status&)> listener) = 0;
  // Calls `passed` (may be empty) from a thread of the fabric once the queue has got here.
  virtual Status mark(int queue, std::function<void()> passed) = 0;
  // The queue's stream, a CUstream: for events of the caller, never for work.
  virtual void* stream(int queue) const = 0;
  // What is enqueued on the queue from here on comes after what is enqueued on the user's stream
  // until now.
  virtual Status wait_for_stream(int queue, void* user_stream) = 0;
  // What is enqueued on the user's stream from here on comes after what is enqueued on the queue
  // until now.
  virtual Status release_stream(int queue, void* user_stream) = 0;
  // Whether all waits and marks have passed.
  virtual bool is_drained() const = 0;
};

// Collective. Any rank's reason (no driver, no kernels, no peer access, MIG, too few connections,
// different nodes) is the answer on all ranks.
Result<std::unique_ptr<CudaFabric>> connect_cuda_fabric(const CudaFabricOptions& options,
                                                        KeyValueStore& store);

}  // namespace tide
