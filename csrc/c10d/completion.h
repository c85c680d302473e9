// Completes Futures, on threads that execute nothing else.
//
// A Future runs its callbacks on the thread that completes it, and callbacks may issue further
// collectives and block on their Futures: torch's powerSGD_hook does. On the thread that executes
// collectives such a callback would wait for itself for ever. So Futures are completed here, and
// since callbacks may block one another in the same way, a task never waits for a thread: if none
// is idle, another is started. Idle threads end after a few seconds.
#pragma once

#include <chrono>
#include <functional>

namespace fccl::c10d_backend {

void complete_elsewhere(std::function<void()> task);

// Waits until every task is done, or for `limit`: at exit, since a callback in Python that still runs while
// the interpreter ends takes the process down.
void drain_completions(std::chrono::milliseconds limit) noexcept;

}  // namespace fccl::c10d_backend
