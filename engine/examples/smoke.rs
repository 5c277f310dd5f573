use engine::*;
use std::time::Instant;
fn main() {
    let dir = std::path::PathBuf::from(std::env::args().nth(1).unwrap());
    let fmt = match std::env::args().nth(2).as_deref() { Some("f32") => WeightFormat::F32, _ => WeightFormat::Bf16 };
    for threads in [1usize, 2] {
        let t = Instant::now();
        let mut e = Engine::load(&LoadOptions { model_dir: dir.clone(), weights: fmt, threads, kv_memory_bytes: 1 << 30, max_model_len: None }).unwrap();
        println!("load {:?} {:?}", t.elapsed(), e.info());
        let ids: Vec<u32> = (0..512u32).map(|i| (i * 37 + 11) % 4096).collect();
        if threads == 1 {
            let o = Oracle::load(&dir, fmt).unwrap();
            let t = Instant::now();
            let a = o.logits_at_every_position(&ids[..100]);
            println!("oracle 100: {:?}", t.elapsed());
            let s = e.open();
            let mut l = e.forward(&[SequenceRows { slot: s, token_ids: &ids[..60], num_logits: 60 }]).unwrap();
            let mut same = (0..60).all(|i| l.row(i) == a[i]);
            for p in 60..100 { l = e.forward(&[SequenceRows { slot: s, token_ids: &ids[p..p+1], num_logits: 1 }]).unwrap(); same &= l.row(0) == a[p]; }
            println!("equal to oracle: {same}");
            e.close(s);
        }
        for n in [1usize, 2, 4, 5, 8, 16, 64, 512] {
            let mut best = f64::MAX;
            for _ in 0..30 {
                let s = e.open();
                e.forward(&[SequenceRows { slot: s, token_ids: &ids[..64], num_logits: 1 }]).unwrap();
                let t = Instant::now();
                e.forward(&[SequenceRows { slot: s, token_ids: &ids[..n], num_logits: if n > 16 { 1 } else { n } }]).unwrap();
                best = best.min(t.elapsed().as_secs_f64());
                e.close(s);
            }
            println!("threads {threads} rows {n}: {:.3} ms, {:.1} GMAC/s", best * 1e3, e.info().num_parameters as f64 * n as f64 / best / 1e9);
        }
    }
}
