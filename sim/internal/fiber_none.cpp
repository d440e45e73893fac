// For places whose functions cannot stop in their middle: one rank runs there,
// on the caller's stack (fiber_world.cpp), and no fiber is made.

#include "sim/internal/fiber.h"

namespace shardbook::sim {

struct Fiber::Impl {};

Fiber::Fiber(std::function<void()>) {
  throw NoFibers("sim: this build has no fibers, and runs one rank only");
}
Fiber::Fiber(Fiber&&) noexcept = default;
Fiber::~Fiber() = default;
void Fiber::resume() {}
void Fiber::suspend() {}
bool Fiber::has_ended() const { return true; }

}  // namespace shardbook::sim
