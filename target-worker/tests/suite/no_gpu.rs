//! `--device cuda:0` without a driver: the process fails with one line that names what is missing.

use std::path::Path;
use std::process::Command;

#[test]
fn a_missing_driver_is_one_line_and_a_failure() {
    let driver = ["libcuda.so", "libcuda.so.1"].iter().any(|name| {
        ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64"]
            .iter()
            .any(|dir| Path::new(dir).join(name).exists())
    });
    if driver {
        println!("skipped: this machine has a driver");
        return;
    }
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/draft");
    let output = Command::new(env!("CARGO_BIN_EXE_outrider-target-worker"))
        .args(["--device", "cuda:0", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--model"])
        .arg(model)
        .output()
        .unwrap();
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    let lines: Vec<&str> = said.lines().filter(|line| line.contains("cuda:0")).collect();
    assert_eq!(lines.len(), 1, "{said}");
    assert!(lines[0].contains("libcuda.so was not found: install the nvidia driver"), "{said}");
    assert!(!said.contains("panicked"), "{said}");
}
