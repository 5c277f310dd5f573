//! End-to-end, fault and exactness tests on real processes
