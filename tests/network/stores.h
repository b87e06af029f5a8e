// Stores for tests: in one process for nodes that are threads, in a folder for nodes that are
// processes (also in different network namespaces, which share the file system).
#pragma once

#include <condition_variable>
#include <cstdio>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>

#include "transports/fabric.h"

namespace tide {

class MemoryStore : public KeyValueStore {
 public:
  Status set(const std::string& key, const std::string& value) override {
    std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
    return Status::ok();
  }
  Result<std::string> get(const std::string& key, Deadline deadline) override {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_until(lock, deadline, [&] { return values_.count(key) != 0; })) {
      return Status(ErrorKind::kTimeout, "no key " + key);
    }
    return values_[key];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

class FolderStore : public KeyValueStore {
 public:
  explicit FolderStore(std::string folder) : folder_(std::move(folder)) {}

  Status set(const std::string& key, const std::string& value) override {
    const std::string path = path_of(key);
    const std::string draft = path + ".draft";
    {
      std::ofstream file(draft, std::ios::binary);
      file << value;
      if (!file.flush()) return {ErrorKind::kSystem, "cannot write " + draft};
    }
    if (std::rename(draft.c_str(), path.c_str()) != 0)
      return {ErrorKind::kSystem, "cannot rename " + draft};
    return Status::ok();
  }
  Result<std::string> get(const std::string& key, Deadline deadline) override {
    while (true) {
      std::ifstream file(path_of(key), std::ios::binary);
      if (file) {
        std::stringstream text;
        text << file.rdbuf();
        return text.str();
      }
      if (Clock::now() >= deadline) return Status(ErrorKind::kTimeout, "no key " + key);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

 private:
  std::string path_of(std::string key) const {
    for (char& c : key) {
      if (c == '/') c = '_';
    }
    return folder_ + "/" + key;
  }
  std::string folder_;
};

}  // namespace tide
