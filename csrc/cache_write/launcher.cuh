// What the launchers of the three cache writers share.
#pragma once

#include <algorithm>

#include "cache_write/config.h"
#include "cache_write/kernel_params.h"
#include "common/cache_rows.h"
#include "common/launch.h"
#include "common/vectors.cuh"

namespace pagedkern {

constexpr int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Blocks and teams for num_slots tokens of `threads_of_token` threads' work each; sets team_tokens and table_size.
inline LaunchConfig team_grid(CacheWriteKernelParams& p, int64_t threads_of_token) {
  using Config = CacheWriteConfig;
  const bool many = p.num_slots >= Config::kManyTokens;
  const int64_t threads = many ? Config::kTeamThreads : Config::kThreads;
  const int64_t wanted = std::min<int64_t>(divide_up(p.num_slots * threads_of_token, threads),
                                           many ? Config::kMaxTeamBlocks : Config::kMaxBlocks);
  int64_t team_blocks = many ? Config::kTeamBlocks : 1;
  while (!many && team_blocks < Config::kTeamBlocks && 2 * team_blocks * p.num_slots <= wanted) {
    team_blocks *= 2;  // few tokens of many heads: more than one block for each
  }
  const int64_t teams = std::clamp<int64_t>(wanted / team_blocks, 1, p.num_slots);
  // Work of a team is numbered in 31 bits.
  const int64_t most_tokens = std::clamp<int64_t>((1 << 30) / threads_of_token, 1, Config::kMaxTeamTokens);
  p.team_tokens = std::min(divide_up(p.num_slots, teams), most_tokens);
  p.table_size = 64;
  while (p.table_size < 4 * p.team_tokens && p.table_size < Config::kTableSize) p.table_size *= 2;
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(std::min(teams, divide_up(p.num_slots, p.team_tokens)) * team_blocks));
  config.block = dim3(static_cast<unsigned>(threads));
  config.cluster = dim3(static_cast<unsigned>(team_blocks));
  return config;
}

// The widest access that rows of 2-byte elements allow.
inline AccessWidth& add_rows(AccessWidth& width, const void* rows, int64_t stride_token, int64_t stride_head) {
  return width.pointer(rows).bytes(2 * stride_token).bytes(2 * stride_head);
}

inline int source_width(const CacheWriteParams& p) {
  AccessWidth width;
  add_rows(width, p.key, p.key_stride_token, p.key_stride_head);
  add_rows(width, p.value, p.value_stride_token, p.value_stride_head);
  return width.bytes(2 * static_cast<int64_t>(p.cache.head_dim)).width();
}

}  // namespace pagedkern
