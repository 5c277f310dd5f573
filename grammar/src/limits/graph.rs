//! Depth of a graph of references, without recursion.

/// The nodes that can be reached from the roots, each after those that it points to. On a cycle one edge is
/// ignored: the one that leads back to where the search came from.
pub(super) fn children_first<'a>(
    num_nodes: usize,
    roots: impl IntoIterator<Item = usize>,
    children: impl Fn(usize) -> Box<dyn Iterator<Item = usize> + 'a>,
) -> Vec<usize> {
    let mut order = Vec::with_capacity(num_nodes);
    let mut is_seen = vec![false; num_nodes];
    for root in roots {
        if std::mem::replace(&mut is_seen[root], true) {
            continue;
        }
        let mut path = vec![(root, children(root))];
        while let Some((node, left)) = path.last_mut() {
            match left.next() {
                Some(child) if std::mem::replace(&mut is_seen[child], true) => {}
                Some(child) => path.push((child, children(child))),
                None => {
                    order.push(*node);
                    path.pop();
                }
            }
        }
    }
    order
}
