#pragma once

// Which rank sits where.
//
// A topology lays the ranks 0..W-1 on a grid with named axes. Systems differ in
// one thing only: which axis varies fastest from one rank to the next.
//
//   Topology grid({"pp", "dp", "tp"}, {4, 2, 2});   // the last varies fastest
//   grid.get_rank({{"tp", 1}, {"dp", 0}, {"pp", 2}});   // 9
//   grid.groups({"pp"})[1];                             // {1, 5, 9, 13}

#include <map>
#include <string>
#include <vector>

namespace shardbook {

/// One coordinate per axis.
using Coord = std::map<std::string, int>;

class Topology {
 public:
  /// Row-major, as DeviceMesh and DeepSpeed write it: the LAST axis varies
  /// fastest. Throws Error on a name that is empty, has a '-' or comes twice,
  /// and on sizes below 1.
  Topology(std::vector<std::string> axes, std::vector<int> sizes);

  /// From an order in Megatron's notation: "tp-cp-dp-pp", where the FIRST axis
  /// varies fastest. Every axis of the order needs a size.
  static Topology from_order(const std::string& order,
                             const std::map<std::string, int>& sizes);

  // The orders of known systems. Parameters are sizes.

  /// Megatron's default "tp-cp-ep-dp-pp": r = tp + t*(cp + c*(dp + d*pp)).
  /// Expert parallelism is a part of dp there, so it moves no rank.
  static Topology megatron(int tp, int cp, int dp, int pp);
  /// Megatron's option "tp-cp-ep-pp-dp": r = tp + t*(cp + c*(pp + p*dp)).
  static Topology megatron_pp_before_dp(int tp, int cp, int pp, int dp);
  /// DeepSpeed, axes [pipe, data]: r = dp + d*pp.
  static Topology deepspeed_2d(int pipe, int data);
  /// DeepSpeed, axes [pipe, data, model]: r = tp + t*(dp + d*pp).
  static Topology deepspeed_3d(int pipe, int data, int model);
  /// Colossal-AI, axes [data, pipe, tensor]: r = tp + t*(pp + p*dp).
  static Topology colossal_ai(int data, int pipe, int tensor);

  const std::vector<std::string>& axes() const { return axes_; }
  const std::vector<int>& sizes() const { return sizes_; }
  int world_size() const { return world_size_; }
  bool has_axis(const std::string& axis) const;
  /// Throws Error that lists the axes.
  int size(const std::string& axis) const;

  /// Every axis has a coordinate below its size.
  int get_rank(const Coord& coord) const;
  Coord get_coord(int rank) const;
  int coordinate(int rank, const std::string& axis) const;

  /// The ranks that differ on these axes only: one list per setting of the
  /// other axes. Lists are ascending and in the order of their first ranks;
  /// together they hold every rank once.
  std::vector<std::vector<int>> groups(
      const std::vector<std::string>& axes) const;

  /// "pp=4 x dp=2 x tp=2"
  std::string text() const;

 private:
  std::size_t position(const std::string& axis) const;

  std::vector<std::string> axes_;
  std::vector<int> sizes_;
  std::vector<int> strides_;
  int world_size_ = 1;
};

/// "dp-cp" -> {"dp", "cp"}
std::vector<std::string> split_axes(const std::string& text);

}  // namespace shardbook
