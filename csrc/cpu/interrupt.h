// The embedder's way to stop a wait (Ctrl-C): see set_interrupt_check in group.h.
#pragma once

namespace fccl::cpu {

// Runs the check if there is one. Meant to be called every few tens of milliseconds by a waiting thread.
// Throws what the check throws.
void check_interrupt();

}  // namespace fccl::cpu
