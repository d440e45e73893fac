#include "comm/topology.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include "core/check.h"

namespace shardbook {

std::vector<std::string> split_axes(const std::string& text) {
  std::vector<std::string> axes;
  std::istringstream stream(text);
  for (std::string axis; std::getline(stream, axis, '-');) axes.push_back(axis);
  return axes;
}

Topology::Topology(std::vector<std::string> axes, std::vector<int> sizes)
    : axes_(std::move(axes)),
      sizes_(std::move(sizes)),
      strides_(axes_.size(), 1) {
  SB_CHECK(axes_.size() == sizes_.size(), "topology: ", axes_.size(),
           " axes and ", sizes_.size(), " sizes; give one size per axis");
  for (std::size_t i = axes_.size(); i-- > 0;) {
    const std::string& axis = axes_[i];
    SB_CHECK(!axis.empty() && axis.find('-') == std::string::npos,
             "topology: '", axis, "' is no name of an axis");
    SB_CHECK(std::count(axes_.begin(), axes_.end(), axis) == 1,
             "topology: axis '", axis, "' is named twice");
    SB_CHECK(sizes_[i] >= 1, "topology: axis '", axis, "' has size ", sizes_[i],
             "; give 1 or more");
    SB_CHECK(world_size_ <= std::numeric_limits<int>::max() / sizes_[i],
             "topology: ", text(), " has more ranks than can be counted");
    strides_[i] = world_size_;
    world_size_ *= sizes_[i];
  }
}

Topology Topology::from_order(const std::string& order,
                              const std::map<std::string, int>& sizes) {
  std::vector<std::string> axes = split_axes(order);
  std::reverse(axes.begin(), axes.end());
  std::vector<int> ordered;
  for (const std::string& axis : axes) {
    const auto found = sizes.find(axis);
    SB_CHECK(found != sizes.end(), "topology: the order '", order,
             "' names axis '", axis, "', which has no size");
    ordered.push_back(found->second);
  }
  for (const auto& [axis, size] : sizes) {
    SB_CHECK(size == 1 || std::count(axes.begin(), axes.end(), axis) == 1,
             "topology: axis '", axis, "' has size ", size,
             " and is missing in the order '", order, "'");
  }
  return Topology(std::move(axes), std::move(ordered));
}

Topology Topology::megatron(int tp, int cp, int dp, int pp) {
  return from_order("tp-cp-dp-pp",
                    {{"tp", tp}, {"cp", cp}, {"dp", dp}, {"pp", pp}});
}

Topology Topology::megatron_pp_before_dp(int tp, int cp, int pp, int dp) {
  return from_order("tp-cp-pp-dp",
                    {{"tp", tp}, {"cp", cp}, {"dp", dp}, {"pp", pp}});
}

Topology Topology::deepspeed_2d(int pipe, int data) {
  return Topology({"pp", "dp"}, {pipe, data});
}

Topology Topology::deepspeed_3d(int pipe, int data, int model) {
  return Topology({"pp", "dp", "tp"}, {pipe, data, model});
}

Topology Topology::colossal_ai(int data, int pipe, int tensor) {
  return Topology({"dp", "pp", "tp"}, {data, pipe, tensor});
}

std::string Topology::text() const {
  std::ostringstream text;
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    text << (i == 0 ? "" : " x ") << axes_[i] << "=" << sizes_[i];
  }
  return text.str();
}

bool Topology::has_axis(const std::string& axis) const {
  return std::count(axes_.begin(), axes_.end(), axis) == 1;
}

std::size_t Topology::position(const std::string& axis) const {
  const auto found = std::find(axes_.begin(), axes_.end(), axis);
  SB_CHECK(found != axes_.end(), "topology ", text(), " has no axis '", axis,
           "'");
  return static_cast<std::size_t>(found - axes_.begin());
}

int Topology::size(const std::string& axis) const {
  return sizes_[position(axis)];
}

int Topology::get_rank(const Coord& coord) const {
  SB_CHECK(coord.size() == axes_.size(), "topology ", text(), ": ",
           coord.size(), " coordinates; give one per axis");
  int rank = 0;
  for (const auto& [axis, value] : coord) {
    const std::size_t i = position(axis);
    SB_CHECK(value >= 0 && value < sizes_[i], "topology ", text(),
             ": coordinate ", value, " on axis '", axis, "'; give 0 to ",
             sizes_[i] - 1);
    rank += value * strides_[i];
  }
  return rank;
}

Coord Topology::get_coord(int rank) const {
  Coord coord;
  for (const std::string& axis : axes_) coord[axis] = coordinate(rank, axis);
  return coord;
}

int Topology::coordinate(int rank, const std::string& axis) const {
  SB_CHECK(rank >= 0 && rank < world_size_, "topology ", text(), ": rank ",
           rank, "; give 0 to ", world_size_ - 1);
  const std::size_t i = position(axis);
  return rank / strides_[i] % sizes_[i];
}

std::vector<std::vector<int>> Topology::groups(
    const std::vector<std::string>& axes) const {
  // The ranks of a group share their coordinates on the other axes. With 0 on
  // the given axes, these are the coordinates of the group's first rank.
  std::vector<std::pair<int, int>> strides_and_sizes;
  for (const std::string& axis : axes) {
    SB_CHECK(std::count(axes.begin(), axes.end(), axis) == 1, "topology ",
             text(), ": a group names axis '", axis, "' twice");
    strides_and_sizes.emplace_back(strides_[position(axis)], size(axis));
  }
  std::vector<std::vector<int>> by_first(static_cast<std::size_t>(world_size_));
  for (int rank = 0; rank < world_size_; ++rank) {
    int first = rank;
    for (const auto& [stride, size] : strides_and_sizes) {
      first -= rank / stride % size * stride;
    }
    by_first[static_cast<std::size_t>(first)].push_back(rank);
  }
  std::vector<std::vector<int>> result;
  for (auto& ranks : by_first) {
    if (!ranks.empty()) result.push_back(std::move(ranks));
  }
  return result;
}

}  // namespace shardbook
