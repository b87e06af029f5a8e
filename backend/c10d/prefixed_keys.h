// A part of a store's keys, for what meets apart from the rest.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "transports/fabric.h"

namespace tide {

class PrefixedKeys : public KeyValueStore {
 public:
  PrefixedKeys(std::shared_ptr<KeyValueStore> store, std::string prefix)
      : store_(std::move(store)), prefix_(std::move(prefix)) {}

  Status set(const std::string& key, const std::string& value) override {
    return store_->set(prefix_ + key, value);
  }
  Result<std::string> get(const std::string& key, Deadline deadline) override {
    return store_->get(prefix_ + key, deadline);
  }
  void remove(const std::string& key) override { store_->remove(prefix_ + key); }

 private:
  const std::shared_ptr<KeyValueStore> store_;
  const std::string prefix_;
};

}  // namespace tide
