// Wrong programs between nodes: seeded mutations of gathers. The checker must refuse every one, but
// those that touch every byte of every memory in the same order as before and keep to the pacing.
#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <optional>
#include <random>

#include "backend/plan/checker.h"
#include "backend/plan/checker_sequence.h"
#include "tests/unit/plan_fixture.h"

namespace tide {
namespace {

using testing::all_processes;
using testing::column_parameter;
using testing::flat_parameter;
using testing::make_layout;

constexpr int kNodes = 3;
constexpr int kLocals = 2;
constexpr int kRanks = kNodes * kLocals;

enum class Mutation {
  kDropStep,
  kSwapSteps,
  kSwapNeighbours,
  kRepeatStep,
  kWrongQueue,
  kWrongShard,
  kWrongFirstNode,
  kWrongShards,
  kWrongNode,
  kWrongRound,
  kWrongPart,
  kWrongEvent,
  kWrongBytes,
  kWrongHead,
  kWrongSpace,
  kWrongPeer,
  kWrongValue,
  kShortenPut,
  kCount
};

const char* mutation_name(Mutation mutation) {
  static const char* const kNames[] = {
      "drop a step", "swap two steps",   "swap two neighbours", "repeat a step", "wrong queue",
      "wrong shard", "wrong first node", "wrong shards",        "wrong node",    "wrong round",
      "wrong part",  "wrong event",      "wrong bytes",         "wrong head",    "wrong space",
      "wrong peer",  "wrong value",      "shorten a put"};
  return kNames[static_cast<int>(mutation)];
}

struct Choice {
  Mutation mutation = Mutation::kDropStep;
  size_t first = 0;
  size_t second = 0;
  uint32_t number = 0;
};

// Another value of [0, count) than `value`.
int other_of(int value, int count, uint32_t number) {
  return (value + 1 + static_cast<int>(number % static_cast<uint32_t>(count - 1))) % count;
}

bool is_part(Op op) { return is_network_step(op) && op != Op::kDrain; }

bool mutate_step(Step* step, const Choice& choice) {
  const bool put = step->op == Op::kPut;
  const bool counted = step->op == Op::kWait || step->op == Op::kSignal;
  switch (choice.mutation) {
    case Mutation::kWrongQueue:
      step->queue =
          static_cast<Queue>(other_of(static_cast<int>(step->queue), kQueueCount, choice.number));
      return true;
    case Mutation::kWrongShard:
      step->shard = other_of(step->shard, kRanks, choice.number);
      return step->op == Op::kCopy;
    case Mutation::kWrongFirstNode:
      step->first_node = other_of(step->first_node, kNodes, choice.number);
      return put;
    case Mutation::kWrongShards:
      step->shards += choice.number % 2 == 0 ? 1 : -1;
      return put;
    case Mutation::kWrongNode:
      step->node = other_of(step->node, kNodes, choice.number);
      return is_part(step->op);
    case Mutation::kWrongRound:
      step->round = static_cast<uint16_t>(other_of(step->round, 3, choice.number));
      return is_part(step->op);
    case Mutation::kWrongPart:
      step->part = static_cast<uint16_t>(other_of(step->part, 3, choice.number));
      return is_part(step->op);
    case Mutation::kWrongEvent:
      step->event =
          static_cast<RailEvent>(other_of(static_cast<int>(step->event), 4, choice.number));
      return step->op == Op::kArrive;
    case Mutation::kWrongBytes:
      step->bytes += choice.number % 2 == 0 ? 2 : -2;
      return put || (step->op == Op::kArrive && step->bytes - 2 > 0);
    case Mutation::kWrongHead:
      step->head_bytes = step->head_bytes > 2 && choice.number % 2 == 0 ? step->head_bytes - 2
                                                                        : step->head_bytes + 2;
      return put;
    case Mutation::kWrongSpace:
      (choice.number % 2 == 0 ? step->from : step->to) = static_cast<Space>(
          other_of(static_cast<int>(choice.number % 2 == 0 ? step->from : step->to), 6,
                   static_cast<uint32_t>(choice.second)));
      return put || step->op == Op::kCopy;
    case Mutation::kWrongPeer:
      step->peer = other_of(std::max(step->peer, 0), kRanks, choice.number);
      return counted || step->op == Op::kCopy;
    case Mutation::kWrongValue:
      step->value += choice.number % 2 == 0 ? 1u : -1u;
      return counted;
    case Mutation::kShortenPut:
      if (choice.number % 2 == 0) {
        --step->last_piece;
      } else {
        ++step->first_piece;
      }
      return put;
    default:
      return false;
  }
}

std::optional<Program> mutate(const Program& original, const Choice& choice) {
  Program program = original;
  std::vector<Step>& steps = program.steps;
  const size_t first = choice.first % steps.size();
  if (choice.mutation == Mutation::kDropStep) {
    steps.erase(steps.begin() + static_cast<ptrdiff_t>(first));
  } else if (choice.mutation == Mutation::kRepeatStep) {
    const Step copy = steps[first];
    steps.insert(steps.begin() + static_cast<ptrdiff_t>(first), copy);
  } else if (choice.mutation == Mutation::kSwapSteps ||
             choice.mutation == Mutation::kSwapNeighbours) {
    const size_t second =
        (choice.mutation == Mutation::kSwapSteps ? choice.second : first + 1) % steps.size();
    if (first == second) return std::nullopt;
    std::swap(steps[first], steps[second]);
  } else if (!mutate_step(&steps[first], choice)) {
    return std::nullopt;
  }
  return program;
}

CheckedSequence right_sequence(GatherSchedule schedule, Pacing pacing, bool masters) {
  const Topology topology({{"a", 0}, {"a", 1}, {"b", 0}, {"b", 1}, {"c", 0}, {"c", 1}});
  std::vector<Parameter> parameters = {flat_parameter(50, kRanks), column_parameter(2, 3, kRanks)};
  if (masters) parameters[0].shard_dtype = DType::kFloat32;
  const auto layout = make_layout(parameters, kRanks);
  SequenceBuilder builder(kRanks);
  const int group = builder.add_group(all_processes(kRanks));
  for (int i = 0; i < 2; ++i) {
    const int gather = builder.gather(group, layout, topology, {schedule, pacing, 8, 24}, 0);
    builder.operation(gather).slot = 0;
    for (Action action : {Action::kIssue, Action::kWaitRead, Action::kUpdateShards, Action::kWait,
                          Action::kUseGathered}) {
      builder.act(action, gather);
    }
  }
  return builder.sequence();
}

// In the programs of one rank (a damaged cache entry), or of all (a wrong plan).
std::optional<CheckedSequence> mutate_sequence(const CheckedSequence& original,
                                               const Choice& choice, int only_rank) {
  CheckedSequence sequence = original;
  for (CheckedOperation& operation : sequence.operations) {
    for (int rank = 0; rank < kRanks; ++rank) {
      if (only_rank >= 0 && rank != only_rank) continue;
      std::optional<Program> program = mutate(*operation.programs[rank], choice);
      if (!program) return std::nullopt;
      operation.programs[rank] = std::make_shared<const Program>(std::move(*program));
    }
  }
  return sequence;
}

TEST(NodeMutationsTest, AllCaughtOrEqual) {
  constexpr int kPerForm = 170;
  int caught = 0;
  std::map<std::string, int> survivors;
  std::map<std::string, int> refusals;
  for (GatherSchedule schedule :
       {GatherSchedule::kDoubling, GatherSchedule::kRing, GatherSchedule::kDirect}) {
    for (Pacing pacing :
         {Pacing::kOff, Pacing::kConfirmWhole, Pacing::kConfirmHead, Pacing::kGrant}) {
      const std::string name =
          std::string(gather_schedule_name(schedule)) + ", pacing " + pacing_name(pacing);
      const CheckedSequence sequence =
          right_sequence(schedule, pacing, schedule == GatherSchedule::kDoubling);
      const CheckReport right = check_all(sequence, 2);
      ASSERT_EQ(right.error, "") << name;
      std::mt19937 random(77 + static_cast<uint32_t>(schedule) * 4 + static_cast<uint32_t>(pacing));
      for (int done = 0; done < kPerForm;) {
        Choice choice;
        choice.mutation = static_cast<Mutation>(random() % static_cast<uint32_t>(Mutation::kCount));
        choice.first = random();
        choice.second = random();
        choice.number = random();
        const int only_rank = random() % 2 == 0 ? -1 : static_cast<int>(random() % kRanks);
        const auto mutant = mutate_sequence(sequence, choice, only_rank);
        if (!mutant) continue;
        ++done;
        const CheckReport report = check_all(*mutant, 2);
        if (!report.is_ok()) {
          ++caught;
          ++refusals[mutation_name(choice.mutation)];
          continue;
        }
        const Program& original = *sequence.operations[0].programs[std::max(only_rank, 0)];
        const Step& step = original.steps[choice.first % original.steps.size()];
        EXPECT_EQ(report.canonical, right.canonical)
            << name << ": " << mutation_name(choice.mutation) << " at "
            << choice.first % original.steps.size()
            << (only_rank < 0 ? " on all ranks" : " on one rank") << " was not caught\n"
            << to_string(original) << "became\n"
            << to_string(*mutant->operations[0].programs[std::max(only_rank, 0)]);
        ++survivors[std::string(mutation_name(choice.mutation)) + ": " +
                    to_string(step).substr(0, 30)];
      }
    }
  }
  std::printf("%d mutants refused\n", caught);
  for (const auto& [what, count] : refusals) std::printf("  %4d  %s\n", count, what.c_str());
  std::printf("mutants that are the same collective:\n");
  for (const auto& [what, count] : survivors) std::printf("  %4d  %s\n", count, what.c_str());
  EXPECT_EQ(refusals.size(), static_cast<size_t>(Mutation::kCount))
      << "a kind of mutation was never tried";
}

}  // namespace
}  // namespace tide
