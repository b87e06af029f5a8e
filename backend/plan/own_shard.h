// The own shard's way to its own place, as gathers of every form begin. Internal to backend/plan.
#pragma once

#include <vector>

#include "backend/plan/cut.h"
#include "backend/plan/steps.h"

namespace tide {

// Every parameter's shard, in the type in which it travels.
std::vector<CutItem> gather_items(const GroupLayout& layout);

// Whether any of the pieces is cast on its way.
bool needs_cast(const GroupLayout& layout, const std::vector<Piece>& pieces);

// Own shard to its own place in `to`, where no parameter needs a cast.
void copy_own(StepWriter& steps, int last_piece, Space to);

// Own shard to its own place in the slot, runs of cast and of plain parameters in turn.
void cast_own(StepWriter& steps, const GroupLayout& layout, const std::vector<Piece>& pieces);

}  // namespace tide
