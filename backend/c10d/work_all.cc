#include "backend/c10d/work_all.h"

#include <algorithm>

namespace tide {

bool WorkAll::isCompleted() {
  return std::all_of(works_.begin(), works_.end(),
                     [](const auto& work) { return work->isCompleted(); });
}

bool WorkAll::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(),
                     [](const auto& work) { return work->isSuccess(); });
}

std::exception_ptr WorkAll::exception() const {
  for (const auto& work : works_) {
    if (std::exception_ptr error = work->exception()) return error;
  }
  return nullptr;
}

std::vector<at::Tensor> WorkAll::result() {
  std::vector<at::Tensor> results;
  for (const auto& work : works_) {
    for (auto& tensor : work->result()) results.push_back(std::move(tensor));
  }
  return results;
}

void WorkAll::synchronize() {
  for (const auto& work : works_) work->synchronize();
}

bool WorkAll::wait(std::chrono::milliseconds timeout) {
  // Every work is waited for before the first error goes up: none may still write when the caller
  // sees it.
  std::exception_ptr error;
  bool completed = true;
  for (const auto& work : works_) {
    try {
      completed = work->wait(timeout) && completed;
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
  return completed;
}

void WorkAll::blockCurrentStream() {
  for (const auto& work : works_) work->blockCurrentStream();
}

void WorkAll::abort() {
  for (const auto& work : works_) work->abort();
}

c10::intrusive_ptr<c10::ivalue::Future> WorkAll::getFuture() {
  auto type = c10::FutureType::create(c10::ListType::create(c10::TensorType::get()));
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(type);
  for (const auto& work : works_) futures.push_back(work->getFuture());
  return c10::collectAll(futures);
}

}  // namespace tide
