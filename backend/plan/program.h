// A program: what one rank does in one collective, as data. Plans make programs (gather_plan.h,
// reduce_plan.h); the engine runs them, the checker proves them, the simulator times them. All
// three read only what stands here.
//
// A program is a list of steps. Each step belongs to a queue; the steps of a queue run in list
// order, different queues run at the same time and meet only through counters. The list order
// itself is one in which all queues of a rank could be merged into a single FIFO and every rank
// would still finish: a wait for a credit comes after every own step that the grant depends on.
//
// Pieces. Steps do not name parameters but ranges of the program's piece table, so their number
// does not grow with the number of parameters. A piece is a run of elements of one parameter's
// shard; the table is sorted by shard order.
//
// Padding never moves: a copy of pieces of shard s moves only their elements before
// valid_numel(parameter, s) (piece_blocks below clips), an accumulate writes zeros behind them.
//
// Nodes. In a group of several nodes a rank pushes to the other ranks of its node only; the rail
// queue moves shards between nodes, to and from the ranks with the same local index. Network steps
// (kPut and what follows it in Op) stand in the direction's rail queue only and map to the calls of
// transports/network.h; an event (kind, round, part) of an operation happens at most once between
// two nodes. Both sides know from the layout how many bytes it tells of; an event of zero bytes is
// neither sent nor waited for. The last network step is kDrain: behind it nothing of the operation
// reads this rank's memory for the rail any more.
//
// Counters. counter c at rank a, from rank b, is a 32-bit word in a's control page that only b
// writes, and that only grows (compared cyclically, nothing is ever reset). A step's `value` counts
// from the start of the operation; the engine adds the sum of `advance[c]` over all earlier
// operations of the group, which is equal on all ranks. Each counter is signalled from one queue
// only, in every program: two queues of different operations could overtake each other and set a
// word back. That is why credits of four kinds are four counters.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "backend/layout/group_layout.h"

namespace tide {

enum class Queue : uint8_t {
  kOwn,         // own copy and cast: delays completion; pushes wait for it only after a cast
  kGatherPush,  // copies of a gather to local peers
  kReducePush,  // copies of a reduce to local peers
  kSum,         // accumulate and combine
  kUnpack,      // landing to output, and the credits of landing areas and outputs
  kArrive,      // last waits of a gather: completion
  kRail,        // puts, confirms and arrivals between nodes, of a gather
  kReduceRail,  // the same of a reduce: neither direction waits for the other's network
  kCombine,     // between nodes, the last sums of a reduce: completion
};
inline constexpr int kQueueCount = 9;

enum class Counter : uint8_t {
  kGatherCredit,   // "my slot is free: write"; signalled by the receiver's gather_push
  kLandingCredit,  // "my landing area (or output) is free: write"; by the receiver's unpack
  kGatherArrival,  // "your bytes are in your slot, output or landing"; by the writer's gather_push
  kLeaseCredit,    // "my vacated slot is staging: write"; by the owner's reduce_push
  kReduceCredit,   // "my staging area is free: write"; by the owner's sum, behind earlier sums
  kReduceArrival,  // "my slices are in your staging"; by the writer's reduce_push
  kCast,           // "the own shard is cast into its own place"; by own, to the rank itself
  kRailArrival,    // "so many shards of other nodes lie in my slot, or in landing"; by rail, to
                   // the rank itself
  // Gather between nodes through landing, to the rank itself.
  kPacked,  // "so many chunks of the own shard lie in landing"; by own
  kPlaced,  // "so many chunks of other nodes' shards lie in my slot"; by unpack
  kLeft,    // "what was put of so many chunks has left"; by rail
  // Reduce between nodes, to the rank itself.
  kPartialReady,  // "partial sums lie in partial and seat memory"; by sum
  kPartialFree,   // "what was put has left"; by reduce_rail
  kSeatArrival,   // "other nodes' partial sums sit"; by reduce_rail
  kSeatFree,      // "the seats were read"; by unpack (push form)
  // Reduce between nodes, to every rank of the node, the rank itself too.
  kBlockArrival,  // "my seats' blocks are with you" (read-add form: "my seats are full"); by unpack
  kBlockCredit,   // "my blocks were added: write" (read-add form: "I have read your seats"); by
                  // combine
};
inline constexpr int kCounterCount = 17;

// Where the elements of a piece range lie. Every space is addressed by (parameter, element) through
// the layout.
enum class Space : uint8_t {
  kShard,     // resident shards, one base per parameter; shard order
  kSlot,      // unsharded parameters in an arena slot; places
  kGradient,  // unsharded gradients, one base per parameter; places, without padding
  kStaging,   // arena: arriving slices of gradients; [area][slice], then Piece::packed_offset
  kLanding,   // arena: pieces of a gather on their way to outputs or slots; as kStaging (between
              // nodes: a slice for each node's shard on the own rail)
  kOutput,    // one base per parameter. Gather: unsharded, places. Reduce: summed, shard order
  // Reduce between nodes: fp32 (fp64 of fp64 gradients); [area][slice], then Piece::partial_offset.
  kPartial,  // this rank's sums over its node, until the rail has put them
  kSeat,     // arena: partial sums of a batch's sources at their seats
  kBlock,    // arena: of a batch's sources, the blocks that this rank adds
  kTotal,    // sums over the batches so far; one area
};
inline constexpr int kSpaceCount = 10;

enum class Op : uint8_t {
  // Pieces of `shard`, from -> to at `peer` (kSelf: own memory). kAllRanks: one store to a window
  // that is open to all, to kSlot; from the same places of the own slot it changes nothing there.
  kCopy,
  // Pieces of the own shard, kShard -> own place in kSlot, shard_dtype -> dtype.
  kCast,
  // Counter at `peer` (or kAllPeers) becomes base + value, after every earlier copy of this queue
  // to it.
  kSignal,
  // Until the counter from `peer` has reached base + value.
  kWait,
  // Own pieces: staging[area][rank] and the own gradient, added in rank order -> kOutput.
  // Between nodes: staging[area][slice + local], local by local, and the own gradient of `shard` ->
  // [area][to_slice] of kPartial or kSeat.
  kAccumulate,
  // block[area][slice], [slice + locals], ... of `shards` sources, behind total[to_slice] unless
  // first_number is 0, added in that order -> total[to_slice], or kOutput behind the last source.
  kCombine,
  // Read-add form of kCombine: seat[area][slice] of every rank of the node, of a batch of `shards`
  // sources; seats that none of them fills read as zeros. The order of the sum is the switch's.
  kReadAdd,
  // Zeros into `shards` whole slices of to[area] from to_slice on.
  kZero,
  // Pieces of the shards of nodes first_node, first_node + 1, ... (`shards` of them, modulo the
  // nodes; always the rank on the own rail) to their places in `to` at `node`, as (round, part):
  // `bytes` in all, the first head_bytes of them counted as the head. The own shard is read in
  // `from`; the others where they landed here, in `to`. Landing: slice `first_node` and on, modulo
  // the nodes, on both sides.
  kPut,
  // "Your head (or everything) of this round is here"; to `node`.
  kConfirm,
  // "My slot is yours to write from this round on"; with Pacing::kGrant: "send this round"; to
  // `node`.
  kGrant,
  // Until `bytes` (kConfirm and kGrant: one message) of the event (round, part) came from `node`.
  kArrive,
  // Until all puts, confirms and grants of this operation by this rank are over.
  kDrain,
};

// What a kArrive waits for; the kinds of transports/network.h.
enum class RailEvent : uint8_t { kHead, kArrival, kConfirm, kGrant };

// When a rail may send the next round of an operation.
enum class Pacing : uint8_t {
  kOff,           // once what it sends is there
  kConfirmWhole,  // once the receiver of the last round has it all
  kConfirmHead,   // once the receiver of the last round has its head: the paper's
  kGrant,         // once its own receiver, with the head of its last round in, asks for it
};

inline constexpr int kSelf = -1;
inline constexpr int kAllPeers = -2;  // every rank of the node but this one: of signals
inline constexpr int kAllRanks = -3;  // every rank of the node, this one too: of copies

struct Piece {
  int parameter = 0;
  int64_t begin = 0;  // first element, in the parameter's padded shard
  int64_t numel = 0;
  int64_t packed_offset = 0;   // bytes from the start of the piece's slice in staging or landing
  int64_t partial_offset = 0;  // the same in partial, seat, block and total memory
};

struct Step {
  Op op = Op::kWait;
  Queue queue = Queue::kOwn;
  int peer = kSelf;     // group rank, kSelf, kAllPeers or kAllRanks
  int first_piece = 0;  // [first_piece, last_piece) of the piece table
  int last_piece = 0;
  int shard = 0;  // kCopy: group rank whose shard the pieces belong to
  Space from = Space::kShard;
  Space to = Space::kSlot;
  int area = 0;      // staging or landing area (0 or 1)
  int slice = 0;     // staging or landing slice: the writer's group rank. Between nodes: of `from`
  int to_slice = 0;  // reduce between nodes: of `to`
  Counter counter = Counter::kGatherCredit;
  uint32_t value = 0;
  // Network steps.
  RailEvent event = RailEvent::kArrival;  // kArrive
  int node = -1;                          // to or from
  uint16_t round = 0;
  uint16_t part = 0;
  int first_node = 0;      // kPut
  int shards = 0;          // kPut: shards, or blocks of consecutive slices; kCombine, kReadAdd:
                           // sources; kZero: slices
  int first_number = 0;    // kCombine, kReadAdd: of its first source (seats.h)
  int64_t bytes = 0;       // kPut, and kArrive of a head or an arrival
  int64_t head_bytes = 0;  // kPut
};

enum class Direction : uint8_t { kGather, kReduce };

struct Program {
  Direction direction = Direction::kGather;
  int ranks = 1;
  int rank = 0;
  // By local: the ranks of the own node, this one among them. Empty: all ranks.
  std::vector<int> node_ranks;
  // By node: the ranks on the own rail, this one at [node]. Empty: one node.
  std::vector<int> rail_ranks;
  int node = 0;
  Pacing pacing = Pacing::kOff;  // what the rail's steps keep to
  std::vector<Piece> pieces;
  std::vector<Step> steps;                           // in FIFO order
  std::array<uint32_t, kCounterCount> advance = {};  // equal on all ranks
  int areas = 0;                                     // staging or landing areas used: 0, 1 or 2
  int64_t slice_bytes = 0;    // bytes of one slice of an area (a multiple of 64)
  int batch = 0;              // reduce between nodes: most sources of a batch
  int64_t partial_bytes = 0;  // and bytes of one slice of partial, seat, block and total memory
  uint64_t hash = 0;          // of everything that must be equal on all ranks

  // Index of the last step that reads a gradient: gradients are free once kReducePush and kSum have
  // both run all their steps up to it. -1 without one.
  int last_gradient_read = -1;

  int nodes() const { return rail_ranks.empty() ? 1 : static_cast<int>(rail_ranks.size()); }
  // Whether `other` is a rank of the own node (this rank too).
  bool is_local(int other) const;
  int locals() const { return node_ranks.empty() ? ranks : static_cast<int>(node_ranks.size()); }
  // Slices of one area of an arena space.
  int slices(Space space) const;
};

inline bool is_network_step(Op op) { return op >= Op::kPut; }
inline Queue rail_queue(Direction direction) {
  return direction == Direction::kGather ? Queue::kRail : Queue::kReduceRail;
}

// Elements of one piece of `shard` that move: those before the shard's padding.
int64_t moved_numel(const GroupLayout& layout, const Piece& piece, int shard);
// The rectangles that they are; as GroupLayout::blocks.
int piece_blocks(const GroupLayout& layout, const Piece& piece, int shard, Block blocks[3]);

// One line a step, for messages and tests: "gather_push  wait gather_credit from 1 >= 1".
std::string to_string(const Step& step);
std::string to_string(const Program& program);
const char* queue_name(Queue queue);
const char* counter_name(Counter counter);
const char* space_name(Space space);
const char* rail_event_name(RailEvent event);
const char* pacing_name(Pacing pacing);

}  // namespace tide
