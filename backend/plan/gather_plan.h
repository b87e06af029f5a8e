// Gather inside one node: every rank pushes its shards to their places on every other rank.
//
// Worked example, 3 ranks, rank 1 (targets rotated by the own index: 2, then 0):
//   gather_push  signal gather_credit to all         "my slot is free"
//   own          copy own shard -> own place
//   gather_push  wait gather_credit from 2; copy shard 1 -> slot of 2; signal gather_arrival to 2
//   gather_push  wait gather_credit from 0; copy shard 1 -> slot of 0; signal gather_arrival to 0
//   arrive       wait gather_arrival from 0, from 2
//
// Cast groups (shard_dtype != dtype somewhere): instead of the own copy a cast writes the own place
// (a plain own copy for parameters that need no cast), signals kCast, and pushes wait for it and
// read kSlot instead of kShard.
//
// To all (slots that are open to all): one store reaches every rank's place, the own one too, so
// there is no own copy, and no target comes first. Rank 1 of 3:
//   gather_push  signal gather_credit to all
//   gather_push  wait gather_credit from 2, from 0
//   gather_push  copy shard 1 -> slot of all ranks; signal gather_arrival to all
//   arrive       wait gather_arrival from 0, from 2
// With casts the store reads the own place, and leaves it as it is.
//
// Bounced form (outputs outside the arena): the shards are cut into chunks of at most
// landing_slice_bytes packed bytes (64-byte aligned per piece, nearly equal chunks); chunk c goes
// to landing area c % 2 of every peer, once that peer has unpacked chunk c - 2; the receiver copies
// it on to its output and grants the area again. Own shard: one copy to the output. Credits come
// from the unpack queue (landing_credit), so they stand behind every earlier call's unpacking; the
// straight form to outputs takes its credits from there too.
//
// The straight form and the bounced form of one layout have equal `advance` and hash, so that ranks
// may decide between them when the call starts: the straight form's signals jump to the same final
// values.
//
// What the engine adds between operations: a gather whose slot was leased staging of an earlier
// reduce starts, on every queue, behind the end of that reduce's sum queue on this rank.
#pragma once

#include "backend/plan/program.h"

namespace tide {

struct GatherOptions {
  Space destination = Space::kSlot;  // kSlot (a planned group) or kOutput (a coalesced call)
  bool bounced = false;              // only with kOutput
  int64_t landing_slice_bytes =
      0;  // of one slice of one landing area; used by the bounced form's cuts in both forms
  bool to_all = false;  // only with kSlot
  bool operator==(const GatherOptions&) const = default;
};

// Casts and to_all only with kSlot; bounced only with kOutput.
Program plan_gather(const GroupLayout& layout, int rank, const GatherOptions& options);

}  // namespace tide
