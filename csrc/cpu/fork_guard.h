// Keeps a forked child from holding its parent's connections open.
//
// A peer notices a rank's death by the end of its socket, and that comes only when the last copy of
// the descriptor is closed. DataLoader workers are forked and hold copies: a killed rank would look
// alive for seconds. So the child replaces each of them, at once after fork(), by /dev/null (replaced,
// not closed: a destructor that runs in the child may close the number again).
#pragma once

namespace fccl::cpu {

void close_in_children(int fd) noexcept;
// Must be called before fd is closed.
void forget_descriptor(int fd) noexcept;

}  // namespace fccl::cpu
