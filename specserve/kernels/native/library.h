// What every file of the library shares: how a function is seen from outside.
//
// A file that is compiled for newer processors (*_avx2.cc and the like) must not include XLA's headers, nor anything of
// the standard library that leaves code of its own (std::vector, std::string): the linker keeps one copy of each inline
// function, and may keep the one that older processors cannot run. A test looks for such copies.
#pragma once

// Everything else is hidden (-fvisibility=hidden).
#define SPECSERVE_EXPORT extern "C" __attribute__((visibility("default")))

// XLA's macro defines a handler but does not export it; a declaration before it does.
#define SPECSERVE_HANDLER(name, implementation, ...)            \
  SPECSERVE_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame* call); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, implementation, __VA_ARGS__)
