// Bytes under way: flows through ports that share. Internal to the simulator.
//
// A flow crosses several ports and runs at the smallest of their equal shares, capacity divided by
// flows. Shares change when a flow begins or ends, and only for flows that meet it in a port.
//
// Worked example: three flows of 1 GB into one port of 1 GB/s, from three ports: each runs at 1/3,
// all end after 3 s. A fourth port's flow elsewhere is not touched.
#pragma once

#include <cstdint>
#include <vector>

namespace tide::simulating {

class Flows {
 public:
  // A flow's end as it now looks; stale once `version` is no longer that of the flow.
  struct End {
    double time = 0;
    int flow = 0;
    uint32_t version = 0;
  };

  int add_port(double capacity);
  // Appends to `changed` the ends of all flows whose rate is new, the begun one among them.
  int begin(double now, double bytes, const std::vector<int>& ports, std::vector<End>* changed);
  bool is_current(int flow, uint32_t version) const { return flows_[flow].version == version; }
  void end(double now, int flow, std::vector<End>* changed);

 private:
  struct Flow {
    double remaining = 0;
    double rate = 0;
    double settled = 0;  // when `remaining` was true
    uint32_t version = 0;
    std::vector<int> ports;
  };
  struct Port {
    double capacity = 0;
    std::vector<int> flows;
  };

  void share(double now, const std::vector<int>& ports, std::vector<End>* changed);
  void settle(double now, int index, std::vector<End>* changed);

  std::vector<Port> ports_;
  std::vector<Flow> flows_;
  std::vector<int> unused_;
};

}  // namespace tide::simulating
