#include "backend/plan/simulator_flows.h"

#include <algorithm>
#include <limits>

namespace tide::simulating {

int Flows::add_port(double capacity) {
  ports_.push_back({capacity, {}});
  return static_cast<int>(ports_.size()) - 1;
}

int Flows::begin(double now, double bytes, const std::vector<int>& ports,
                 std::vector<End>* changed) {
  int index = static_cast<int>(flows_.size());
  if (unused_.empty()) {
    flows_.emplace_back();
  } else {
    index = unused_.back();
    unused_.pop_back();
  }
  Flow& flow = flows_[index];
  flow.remaining = bytes;
  flow.rate = 0;
  flow.settled = now;
  flow.ports = ports;
  for (int port : ports) ports_[port].flows.push_back(index);
  share(now, ports, changed);
  return index;
}

void Flows::end(double now, int index, std::vector<End>* changed) {
  const std::vector<int> ports = std::move(flows_[index].ports);
  flows_[index].ports.clear();
  ++flows_[index].version;
  for (int port : ports) {
    std::vector<int>& flows = ports_[port].flows;
    flows.erase(std::find(flows.begin(), flows.end(), index));
  }
  unused_.push_back(index);
  share(now, ports, changed);
}

void Flows::share(double now, const std::vector<int>& ports, std::vector<End>* changed) {
  for (int port : ports) {
    for (int flow : ports_[port].flows) settle(now, flow, changed);
  }
}

void Flows::settle(double now, int index, std::vector<End>* changed) {
  Flow& flow = flows_[index];
  double rate = std::numeric_limits<double>::infinity();
  for (int port : flow.ports) {
    rate = std::min(rate, ports_[port].capacity / static_cast<double>(ports_[port].flows.size()));
  }
  if (rate == flow.rate) return;
  flow.remaining = std::max(0.0, flow.remaining - flow.rate * (now - flow.settled));
  flow.settled = now;
  flow.rate = rate;
  changed->push_back({now + flow.remaining / rate, index, ++flow.version});
}

}  // namespace tide::simulating
